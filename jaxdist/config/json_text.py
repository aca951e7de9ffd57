"""JSON in: the small files beside a model are of anyone's making."""

import json
from typing import Any

from jaxdist.config.errors import UsageError


def read_object(text: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object that `text` holds; UsageError, which begins with `where`, for all else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # also no UTF-8, and thousands of digits
        raise UsageError(f"{where} is not JSON ({str(error)[:100]}); mend or remove it") from None
    if not isinstance(value, dict):
        raise UsageError(f"{where} is not a JSON object; mend or remove it")
    return value
