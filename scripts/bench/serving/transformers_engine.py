"""transformers as a contender: `generate` with its own cache, all prompts in one batch."""

import os
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from bench.serving.spec import EngineSpec

TRIAL_ROWS = 4
HOPELESS = 4  # times slower at first sight: not timed again


def start(spec: EngineSpec) -> "Transformers":
    """Load the model in the faster of bf16 and fp32: many CPUs multiply bf16 very slowly."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    seconds = {}
    models = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(spec.model, dtype=dtype).eval()
        models[dtype], seconds[dtype] = model, _trial(model, min(seconds.values(), default=None))
    best = min(seconds, key=seconds.__getitem__)
    about = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "dtype": str(best).removeprefix("torch."),
        "trial_seconds": {str(dtype).removeprefix("torch."): s for dtype, s in seconds.items()},
    }
    return Transformers(models[best], about)


class Transformers:
    """See `spec.Engine`."""

    def __init__(self, model: Any, about: dict[str, Any]):
        self._model, self.about = model, about

    def counters(self) -> dict[str, float]:
        """None are kept."""
        return {}

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """The likeliest tokens after each prompt; all prompts have one length."""
        ids = torch.tensor(prompts, device=self._model.device)
        found = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        return found[:, ids.shape[1] :].tolist()


@torch.inference_mode()
def _trial(model: Any, best: float | None) -> float:
    """Seconds of a forward of a few rows: the first one's where that is hopeless."""
    ids = torch.ones((TRIAL_ROWS, 1), dtype=torch.long)
    seconds = []
    for _ in range(4):
        begin = time.perf_counter()
        model(input_ids=ids)
        seconds.append(time.perf_counter() - begin)
        if best is not None and seconds[0] > HOPELESS * best and len(seconds) > 1:
            break
    return min(seconds)
