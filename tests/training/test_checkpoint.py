import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxdist.config import CheckpointConfig, UsageError
from jaxdist.training.checkpoint import Checkpointer

KEEP_ALL = CheckpointConfig(keep_last=1000)


class Linear(nnx.Module):
    def __init__(self, key):
        self.weight = nnx.Param(jax.random.normal(key, (8, 16)), axes=("layers", "embed", "mlp"))


class Model(nnx.Module):
    def __init__(self, key):
        self.embed_tokens = nnx.Param(jax.random.normal(key, (32, 8)), axes=("vocab", "embed"))
        self.layers = jax.vmap(Linear)(jax.random.split(key, 4))
        self.lm_head = None


def make_mesh(*shape: int) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("dp", "pp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 3)


def make_state(seed: int = 0):
    params: Any = Model(jax.random.key(seed))
    opt_state = jax.tree.map(lambda leaf: leaf + 1, optax.adamw(0.1).init(params))
    return {
        "params": params,
        "opt_state": opt_state,
        "loss_scale": None,
        "half": jnp.linspace(-3, 3, 8, dtype=jnp.bfloat16),
        "step": jnp.int32(seed),
        "rng": jax.random.key(seed + 17),
    }


def sharded(tree, mesh, spec: PartitionSpec):
    """Every leaf of rank 2 or more by `spec`, the others replicated."""

    def place(leaf):
        fits = PartitionSpec(*spec[-leaf.ndim :]) if leaf.ndim > 1 else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, fits))

    return jax.tree.map(place, tree)


def abstract(tree):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


def bits(tree) -> list[bytes]:
    def words(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [words(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_restored_on_another_mesh_and_sharding_bit_by_bit(tmp_path):
    state = sharded(make_state(), make_mesh(4, 1, 2), PartitionSpec(None, "dp", "tp"))
    with_targets = [
        sharded(make_state(1), make_mesh(2, 2, 2), PartitionSpec("pp", ("dp", "tp"), None)),
        sharded(make_state(1), make_mesh(1, 4, 2), PartitionSpec("pp", None, "tp")),
        make_state(1),
    ]
    saver = Checkpointer(tmp_path, KEEP_ALL)
    saver.save(3, state, {"step": 3, "config": {"mesh": "4x1x2"}})
    saver.close()
    for other in with_targets:
        restorer = Checkpointer(tmp_path, KEEP_ALL)
        got, extra = restorer.restore(3, abstract(other))
        assert bits(got) == bits(state)
        assert extra == {"step": 3, "config": {"mesh": "4x1x2"}}
        for leaf, target in zip(jax.tree.leaves(got), jax.tree.leaves(other), strict=True):
            assert leaf.sharding == target.sharding and leaf.dtype == target.dtype
        assert jax.tree.structure(got) == jax.tree.structure(other)
        restorer.close()


def test_random_keys_draw_the_same_after_restore(tmp_path):
    saver = Checkpointer(tmp_path, KEEP_ALL)
    saver.save(1, make_state(), {})
    got, _ = saver.restore(1, make_state(5))
    saver.close()
    assert jax.random.uniform(got["rng"]) == jax.random.uniform(make_state()["rng"])


def test_state_may_be_donated_while_it_is_written(tmp_path):
    state = {"w": jnp.arange(2**22, dtype=jnp.float32)}
    want = bits(state)
    clobber = jax.jit(lambda s: jax.tree.map(lambda leaf: -leaf, s), donate_argnums=0)
    saver = Checkpointer(tmp_path, KEEP_ALL)
    saver.save(1, state, {})
    for _ in range(4):
        state = clobber(state)
    saver.wait()
    assert bits(saver.restore(1, state)[0]) == want
    saver.close()


def test_parameters_alone_are_restored_beside_a_running_trainer(tmp_path):
    trainer = Checkpointer(tmp_path, KEEP_ALL)
    trainer.save(2, make_state(), {"tokens": 5})
    trainer.wait()
    reader = Checkpointer(tmp_path, None)
    assert reader.latest_step() == 2
    params = reader.restore_part(2, "params", jax.eval_shape(Model, jax.random.key(1)))
    assert bits(params) == bits(make_state()["params"])
    assert params.embed_tokens.get_value().sharding == SingleDeviceSharding(jax.devices()[0])
    assert reader.extra(2) == {"tokens": 5}
    reader.close()
    trainer.save(4, make_state(4), {})
    trainer.close()


def test_dtype_is_that_of_the_target(tmp_path):
    saver = Checkpointer(tmp_path, KEEP_ALL)
    saver.save(1, {"w": jnp.full(4, 1.5)}, {})
    got, _ = saver.restore(1, {"w": jax.ShapeDtypeStruct((4,), jnp.bfloat16)})
    saver.close()
    assert got["w"].dtype == jnp.bfloat16 and got["w"][0] == 1.5


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(2, None, [5, 6]), (1, 3, [0, 3, 6]), (2, 4, [0, 4, 5, 6])],
)
def test_which_checkpoints_are_kept(tmp_path, keep_last, keep_every, kept):
    saver = Checkpointer(tmp_path, CheckpointConfig(keep_last=keep_last, keep_every=keep_every))
    for step in range(7):
        saver.save(step, {"step": jnp.int32(step)}, {})
    saver.close()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == kept


def test_saving_a_step_again_is_harmless(tmp_path):
    for value in (1, 2):
        saver = Checkpointer(tmp_path, KEEP_ALL)
        saver.save(5, {"w": jnp.int32(value)}, {"value": value})
        assert saver.latest_step() == 5
        saver.close()
    got, extra = Checkpointer(tmp_path, None).restore(5, {"w": jnp.int32(0)})
    assert (got["w"], extra) == (1, {"value": 1})


def test_synchronous_saves(tmp_path):
    saver = Checkpointer(tmp_path, CheckpointConfig(asynchronous=False))
    saver.save(5, make_state(), {})
    assert (tmp_path / "5").is_dir()
    saver.close()


def test_incomplete_checkpoints_are_ignored_and_cleaned_away(tmp_path):
    saver = Checkpointer(tmp_path, KEEP_ALL)
    saver.save(1, make_state(), {})
    saver.close()
    (tmp_path / "2.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    assert Checkpointer(tmp_path, None).latest_step() == 1
    assert (tmp_path / "2.orbax-checkpoint-tmp").exists()  # a reader touches nothing
    resumed = Checkpointer(tmp_path, KEEP_ALL)
    resumed.save(2, make_state(2), {})
    resumed.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_a_missing_directory_and_an_empty_one(tmp_path):
    assert Checkpointer(tmp_path / "new", KEEP_ALL).latest_step() is None
    with pytest.raises(UsageError, match=f"no checkpoint in {tmp_path}/none"):
        Checkpointer(tmp_path / "none", None)


def test_another_model_or_optimizer_is_named(tmp_path):
    saver = Checkpointer(tmp_path, KEEP_ALL)
    saver.save(1, {"params": {"w": jnp.ones((2, 3))}}, {})
    with pytest.raises(UsageError, match=r"params/w has shape \(2, 3\), not \(2, 4\)"):
        saver.restore(1, {"params": {"w": jnp.ones((2, 4))}})
    with pytest.raises(UsageError, match="holds no ema/w") as error:
        saver.restore(1, {"params": {"w": jnp.ones((2, 3))}, "ema": {"w": jnp.ones((2, 3))}})
    assert str(tmp_path) in str(error.value)
    got, _ = saver.restore(1, {"params": {"w": jnp.zeros((2, 3))}})
    assert got["params"]["w"].sum() == 6
    saver.close()


@pytest.mark.parametrize(
    "part", ["extra", "state", "state/_METADATA", "state/ocdbt.process_0", "state/d"]
)
def test_a_damaged_checkpoint_is_one_line_with_the_fix(tmp_path, part):
    saver = Checkpointer(tmp_path, KEEP_ALL)
    saver.save(1, make_state(), {})
    saver.close()
    damaged = tmp_path / "1" / part
    damaged.unlink() if damaged.is_file() else shutil.rmtree(damaged)
    reader = Checkpointer(tmp_path, None)
    with pytest.raises(
        UsageError, match=f"step 1 could not be read.* remove {tmp_path}/1"
    ) as error:
        reader.restore(1, make_state())
    assert "\n" not in str(error.value)
    reader.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_bit_that_changed_in_the_arrays_is_found(tmp_path, seed):
    saver = Checkpointer(tmp_path, KEEP_ALL)
    state = {"w": jax.random.normal(jax.random.key(0), (128, 256))}
    saver.save(1, sharded(state, make_mesh(4, 1, 2), PartitionSpec("dp", "tp")), {})
    saver.close()
    arrays = max((tmp_path / "1/state/ocdbt.process_0/d").iterdir(), key=lambda f: f.stat().st_size)
    content = bytearray(arrays.read_bytes())
    draw = random.Random(seed)
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    arrays.write_bytes(content)
    with pytest.raises(UsageError, match="step 1 could not be read.*remove") as error:
        Checkpointer(tmp_path, None).restore(1, state)
    assert "\n" not in str(error.value)


def test_arrays_that_are_not_as_saved_are_named(tmp_path):
    saver = Checkpointer(tmp_path, KEEP_ALL)
    saver.save(1, {"params": {"v": jnp.ones(3), "w": jnp.ones((2, 3))}}, {})
    saver.close()
    file = tmp_path / "1" / "checksums" / "metadata"
    sums = json.loads(file.read_text())
    file.write_text(json.dumps({**sums, "params/w": sums["params/w"] ^ 1}))
    reader = Checkpointer(tmp_path, None)
    with pytest.raises(UsageError, match="params/w differs from what was saved"):
        reader.restore_part(1, "params", {"v": jnp.zeros(3), "w": jnp.zeros((2, 3))})
    assert reader.restore_part(1, "params", {"v": jnp.zeros(3)})["v"].sum() == 3
    halves = {"w": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)}  # rounded: nothing to compare
    assert reader.restore_part(1, "params", halves)["w"].sum() == 6
    file.write_text("{")
    with pytest.raises(UsageError, match="step 1 could not be read.*remove"):
        reader.restore_part(1, "params", {"v": jnp.zeros(3)})


def test_a_checkpoint_without_checksums_is_read_as_before(tmp_path):
    saver = Checkpointer(tmp_path, KEEP_ALL)
    saver.save(1, make_state(), {})
    saver.close()
    shutil.rmtree(tmp_path / "1" / "checksums")
    got, _ = Checkpointer(tmp_path, None).restore(1, make_state(3))
    assert bits(got) == bits(make_state())


RESTORE_DAMAGED = """
import gc
import sys
import jax.numpy as jnp
from jaxdist.config import UsageError
from jaxdist.training.checkpoint import Checkpointer

for _ in range(20):
    try:
        Checkpointer(sys.argv[1], None).restore(1, {f"w{i}": jnp.ones(64) for i in range(40)})
    except UsageError as error:
        print(error)
    gc.collect()
"""


@pytest.mark.slow
def test_reads_that_a_damaged_checkpoint_leaves_running_print_nothing(tmp_path):
    saver = Checkpointer(tmp_path, KEEP_ALL)
    saver.save(1, {f"w{i}": jnp.ones(64) for i in range(40)}, {})
    saver.close()
    shutil.rmtree(tmp_path / "1" / "state" / "d")
    done = subprocess.run(
        [sys.executable, "-c", RESTORE_DAMAGED, str(tmp_path)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.stderr == "" and done.returncode == 0
    assert len(done.stdout.splitlines()) == 20


def test_unwritable_directory_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=f"in {tmp_path}/file/checkpoints") as error:
        Checkpointer(tmp_path / "file" / "checkpoints", KEEP_ALL)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(tmp_path, asynchronous, caplog):
    saver = Checkpointer(tmp_path, CheckpointConfig(asynchronous=asynchronous))
    saver.save(1, make_state(), {})
    saver.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # writes fail beyond this size
    try:
        with pytest.raises(UsageError, match=f"could not be written in {tmp_path}") as error:
            saver.save(2, {"w": jax.random.normal(jax.random.key(0), (2**18,))}, {})
            saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    saver.close()  # the error was raised once, and is not raised again
    assert "\n" not in str(error.value) and not caplog.records
    reader = Checkpointer(tmp_path, None)
    assert reader.latest_step() == 1
    assert bits(reader.restore(1, make_state(7))[0]) == bits(make_state())


SAVE_FOR_EVER = """
import sys
import jax.numpy as jnp
from jaxdist.config import CheckpointConfig
from jaxdist.training.checkpoint import Checkpointer

saver = Checkpointer(sys.argv[1], CheckpointConfig(keep_last=2, keep_every=50))
step = (saver.latest_step() or 0) + 1
while True:
    state = {f"w{i}": jnp.full((64, 64), step * 31 + i, jnp.float32) for i in range(8)}
    saver.save(step, state, {"step": step})
    print(step, flush=True)
    step += 1
"""


def kill_while_saving(directory: Path, kills: int) -> None:
    """Kills a process amid its saves, `kills` times; each time the newest one must be whole."""
    draw = random.Random(0)
    newest = 0
    for _ in range(kills):
        with subprocess.Popen(
            [sys.executable, "-c", SAVE_FOR_EVER, str(directory)],
            stdout=subprocess.PIPE,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        ) as process:
            assert process.stdout and process.stdout.readline()  # the first save has begun
            time.sleep(draw.uniform(0.05, 0.8))
            process.send_signal(signal.SIGKILL)
        reader = Checkpointer(directory, None)
        step = reader.latest_step()
        assert step is None or step >= newest
        if step is None:
            continue
        newest = step
        got, extra = reader.restore(step, {f"w{i}": jnp.zeros((64, 64)) for i in range(8)})
        assert extra == {"step": step}
        for i in range(8):
            np.testing.assert_array_equal(got[f"w{i}"], np.full((64, 64), step * 31 + i))
    assert newest > 0


@pytest.mark.slow
def test_killed_while_saving(tmp_path):
    kill_while_saving(tmp_path, kills=2)


@pytest.mark.slow
def test_killed_while_saving_many_times(tmp_path):
    kill_while_saving(tmp_path, kills=12)


SAVE_TOGETHER = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxdist.config import CheckpointConfig
from jaxdist.training.checkpoint import Checkpointer

jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))

def array(step, spec):
    whole = np.arange(16.0, dtype=np.float32) + step
    return jax.make_array_from_callback((16,), NamedSharding(mesh, spec), lambda i: whole[i])

saver = Checkpointer(sys.argv[3], CheckpointConfig(keep_last=2))
for step in range(1, 5):
    state = {"shards": array(step, PartitionSpec("dp")), "copies": array(step, PartitionSpec())}
    saver.save(step, state, {"step": step})
got, extra = saver.restore(4, {"shards": state["copies"], "copies": state["shards"]})
local = np.concatenate([s.data for s in got["copies"].addressable_shards])
first = 8 * int(sys.argv[2])
assert np.array_equal(local, np.arange(first, first + 8) + 4), local
saver.close()
jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_two_processes_save_together_and_one_restores(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SAVE_TOGETHER, address, str(index), str(tmp_path)],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        for index in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
    reader = Checkpointer(tmp_path, None)
    got, extra = reader.restore(4, {"shards": jnp.zeros(16), "copies": jnp.zeros(16)})
    assert extra == {"step": 4}
    for leaf in got.values():
        np.testing.assert_array_equal(leaf, np.arange(16) + 4)


def test_extra_is_readable_json_on_disk(tmp_path):
    saver = Checkpointer(tmp_path, KEEP_ALL)
    saver.save(1, {"w": jnp.ones(2)}, {"step": 1})
    saver.close()
    assert json.loads((tmp_path / "1" / "extra" / "metadata").read_text()) == {"step": 1}
