"""Decoding at a long context with random weights: the worker of bench_serve_gpu.py.

Started as `python -m bench.serving.gpu_worker SPEC_JSON`. Each line it is sent holds a batch size;
it answers with the time of each decode step in which all sequences took part.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

# batch size -> seconds of each step, mean context of a sequence meanwhile
Decode = Callable[[int], tuple[list[float], float]]


@dataclass(frozen=True, kw_only=True)
class DecodeSpec:
    """A contender.

    Attributes:
        framework: jaxdist or transformers.
        fields: The model's, as Hugging Face and jaxdist both name them.
        context: Tokens of a sequence about which its steps are timed.
        steps: That are timed.
        batches: Sizes that will be asked for.
        device: gpu; cpu tries the script out.
    """

    framework: str
    fields: dict[str, Any]
    context: int
    steps: int
    batches: tuple[int, ...]
    device: str = "gpu"

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt: the timed steps are about the context."""
        return self.context - self.steps // 2

    def prompts(self, batch: int) -> list[list[int]]:
        """Random ids."""
        rng = np.random.default_rng(batch)
        return rng.integers(0, self.fields["vocab_size"], (batch, self.prompt_tokens)).tolist()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "DecodeSpec":
        fields = json.loads(text)
        return cls(**fields | {"batches": tuple(fields["batches"])})


def main() -> None:
    """Serve turns until the parent hangs up."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    spec = DecodeSpec.from_json(sys.argv[1])
    decode, about = {"jaxdist": jaxdist, "transformers": transformers}[spec.framework](spec)
    print(json.dumps(about), file=replies)
    for line in sys.stdin:
        seconds, context = decode(int(line))
        print(json.dumps({"seconds": seconds, "context": context}), file=replies)


def jaxdist(spec: DecodeSpec) -> tuple[Decode, dict]:
    """The engine, stepped; its prompts enter over several steps, before the timed ones."""
    import jax

    from jaxdist import SamplingParams
    from jaxdist.config import MeshShape, ModelConfig
    from jaxdist.inference.device.model_runner import ModelRunner
    from jaxdist.inference.device.runner_options import RunnerOptions
    from jaxdist.inference.engine import Engine
    from jaxdist.inference.engine_options import EngineOptions

    weight_bytes = 0

    def load(like: Any) -> Any:
        nonlocal weight_bytes
        model = _random(like)
        weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
        return model

    most = max(spec.batches)
    entering = 2 * most  # steps that the last prompt may enter after the first, and some
    length = spec.context + spec.steps + entering
    runner = ModelRunner(
        ModelConfig(**spec.fields),
        load,
        mesh=MeshShape.parse("1x1x1"),
        options=RunnerOptions(
            max_num_seqs=most,
            max_model_len=length,
            max_row_tokens=spec.context,
            num_blocks=1 + most * -(-length // RunnerOptions().block_size),
        ),
    )
    engine = Engine(
        runner,
        options=EngineOptions(
            enable_prefix_caching=False,
            max_num_batched_tokens=max(8192, spec.context),
        ),
        eos_ids=(),
    )

    def decode(batch: int) -> tuple[list[float], float]:
        params = SamplingParams(temperature=0, max_tokens=spec.steps + entering, ignore_eos=True)
        names = [str(number) for number in range(batch)]
        for name, prompt in zip(names, spec.prompts(batch), strict=True):
            engine.add_request(name, prompt, params)
        lengths: dict[str, int] = {}
        times: list[float] = []
        while len(times) <= spec.steps:
            for output in engine.step():
                lengths[output.request_id] = len(output.outputs[0].token_ids)
            if len(lengths) == batch:
                times.append(time.perf_counter())
        # Each step added one token to each.
        context = spec.prompt_tokens + float(np.mean(list(lengths.values()))) - spec.steps / 2
        for name in names:
            engine.abort_request(name)
        while engine.has_unfinished_requests():
            engine.step()
        return np.diff(times).tolist(), context

    return decode, {"weight_bytes": weight_bytes, "jax": jax.__version__}


def transformers(spec: DecodeSpec) -> tuple[Decode, dict]:
    """`generate` with its cache, timed from token to token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteriaList

    device = "cuda" if spec.device == "gpu" else "cpu"
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**spec.fields)).to(torch.bfloat16).eval()

    @torch.inference_mode()
    def decode(batch: int) -> tuple[list[float], float]:
        ids = torch.tensor(spec.prompts(batch), device=device)
        times: list[float] = []

        def watch(found: Any, scores: Any, **_: Any) -> Any:
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            return torch.zeros(len(found), dtype=torch.bool, device=device)

        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=spec.steps + 1,
            max_new_tokens=spec.steps + 1,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([watch]),
        )
        return np.diff(times).tolist(), spec.prompt_tokens + spec.steps / 2

    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return decode, {"weight_bytes": weights, "torch": torch.__version__}


def _random(like: Any) -> Any:
    """Parameters with the shapes, dtypes and shardings of `like`, made on the device."""
    import jax
    import jax.numpy as jnp

    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = []
    for key, leaf in zip(keys, leaves, strict=True):

        def draw(key: Any, leaf: Any = leaf) -> Any:
            return (0.02 * jax.random.normal(key, leaf.shape, jnp.float32)).astype(leaf.dtype)

        made.append(jax.jit(draw, out_shardings=leaf.sharding)(key))
    return structure.unflatten(made)


if __name__ == "__main__":
    main()
