"""How long weights take from a file into a mesh, against safetensors' own reader.

python scripts/bench_load.py FOLDER [--tp 2] [--dtype bfloat16] [--rounds 5]

FOLDER is a Hugging Face folder with one model.safetensors, such as `jaxdist convert` makes of what
scripts/fetch_model.sh fetches. Both read from the page cache, in turns; the least time counts.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxdist import platform
from jaxdist.config import one_line_errors


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", help="of the parameters")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with one_line_errors("bench_load"):
        platform.simulate_devices(options.tp)
        compare(options.folder, options.tp, options.dtype, options.rounds)


def compare(folder: Path, tp: int, dtype: str, rounds: int) -> None:
    """Print both times and their ratio."""
    import jax
    import jax.numpy as jnp
    from safetensors.numpy import load_file

    from jaxdist.config import MeshShape, ParallelConfig
    from jaxdist.interop.huggingface.folder import open_huggingface
    from jaxdist.interop.source import load_parameters
    from jaxdist.models import Transformer
    from jaxdist.parallel.mesh import make_mesh
    from jaxdist.parallel.sharding import Rules, layouts, parameter_specs, shardings

    shape = MeshShape(dp=1, pp=1, tp=tp)
    mesh = make_mesh(shape)
    config = open_huggingface(folder).config
    like = jax.eval_shape(
        lambda key: Transformer(config, key=key, param_dtype=jnp.dtype(dtype)), jax.random.key(0)
    )
    specs = parameter_specs(layouts(like, Rules.of(config, ParallelConfig(), shape)), zero=0)
    like = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        like,
        shardings(mesh, specs),
    )

    def ours() -> Any:
        return jax.block_until_ready(load_parameters(open_huggingface(folder), like))

    def theirs() -> Any:
        return load_file(folder / "model.safetensors")

    best = {"jaxdist": float("inf"), "safetensors": float("inf")}
    for _ in range(rounds):
        for name, read in (("safetensors", theirs), ("jaxdist", ours)):
            best[name] = min(best[name], seconds(read))
    size = (folder / "model.safetensors").stat().st_size / 1e6
    print(f"safetensors.numpy.load_file: {best['safetensors']:.3f} s for {size:.0f} MB")
    print(f"jaxdist into (1,1,{tp}) as {dtype}: {best['jaxdist']:.3f} s")
    print(f"ratio {best['jaxdist'] / best['safetensors']:.2f}")


def seconds(read: Callable[[], Any]) -> float:
    """Time of one call, whose result is dropped outside of it."""
    start = time.perf_counter()
    result = read()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


if __name__ == "__main__":
    main()
