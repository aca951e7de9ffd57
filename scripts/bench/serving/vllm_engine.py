"""vLLM as a contender, where the interpreter has it (its CPU build, on a CPU)."""

import vllm  # pyright: ignore[reportMissingImports]

from bench.serving.spec import EngineSpec


def start(spec: EngineSpec) -> "Vllm":
    """Load the model in bf16."""
    return Vllm(spec)


class Vllm:
    """See `spec.Engine`."""

    def __init__(self, spec: EngineSpec):
        self._llm = vllm.LLM(
            spec.model,
            dtype="bfloat16",
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_num_seqs,
            enable_prefix_caching=False,
        )
        self.about = {"vllm": vllm.__version__, "dtype": "bfloat16"}

    def counters(self) -> dict[str, float]:
        """None are kept."""
        return {}

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """The likeliest tokens after each prompt."""
        params = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
