"""jaxdist as a contender: `jaxdist.LLM` as a user calls it, in bf16."""

from importlib.metadata import version

from bench.serving.spec import BLOCK_SIZE, POOL_TOKENS, EngineSpec
from jaxdist import LLM, SamplingParams, platform
from jaxdist.config import MeshShape


def start(spec: EngineSpec) -> "Jaxdist":
    """Load the model; programs are compiled by the first turns, which do not count."""
    platform.compilation_cache()
    if spec.mesh != "auto":
        platform.simulate_devices(MeshShape.parse(spec.mesh).size)
    return Jaxdist(spec)


class Jaxdist:
    """See `spec.Engine`."""

    def __init__(self, spec: EngineSpec):
        self._llm = LLM(
            spec.model,
            mesh=spec.mesh,
            dtype="bfloat16",
            max_num_seqs=spec.max_num_seqs,
            max_model_len=spec.max_model_len,
            block_size=BLOCK_SIZE,
            num_blocks=POOL_TOKENS // BLOCK_SIZE,
        )
        self.about = {"jax": version("jax"), "dtype": "bfloat16", "mesh": spec.mesh}

    def counters(self) -> dict[str, float]:
        """Seconds outside of the runner and waiting for it, and programs compiled."""
        stats = self._llm.engine.stats()
        return {
            "host_seconds": stats.counters.host_seconds,
            "runner_seconds": stats.counters.runner_seconds,
            "steps": stats.counters.num_steps,
            "compilations": stats.runner["num_compilations"],
        }

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """The likeliest tokens after each prompt."""
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        outputs = self._llm.generate(prompts, params)
        return [list(output.outputs[0].token_ids) for output in outputs]
