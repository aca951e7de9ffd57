"""How a model wants to be sampled: what its generation_config.json says.

As vLLM's `--generation-config auto`: these are the defaults of requests that say nothing else.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxdist.config import UsageError
from jaxdist.inference.sampling.sampling_params import SamplingParams

FILE = "generation_config.json"
CHOICES = ("auto", "none")
_FIELDS = {
    name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
} | {"max_new_tokens": "max_tokens"}


def sampling_defaults(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Fields of SamplingParams that the model's small files set; no file sets none.

    files: As `ModelSource.companions` gives them. `do_sample` is not looked at, as in vLLM: the
    temperature says it. Raises UsageError for a file that cannot be read, or a value out of range.
    """
    try:
        told = json.loads(files.get(FILE, b"{}"))
        if not isinstance(told, dict):
            raise UsageError("it holds no object")
        given = {ours: told[name] for name, ours in _FIELDS.items() if told.get(name) is not None}
        SamplingParams(**given)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"the model's {FILE}: {error}; mend it, or leave it out with --generation-config none"
        ) from None
    return given


def described(defaults: Mapping[str, Any]) -> str:
    """One line for whoever starts the model."""
    values = ", ".join(f"{name}={value}" for name, value in defaults.items())
    return f"requests sample by {values} where they say nothing else ({FILE})"
