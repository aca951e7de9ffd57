"""Which dialect a model writes."""

import re

from jaxdist.server.dialects import (
    between_marks,
    hermes,
    llama3_json,
    mistral,
    pythonic,
    qwen3_coder,
)
from jaxdist.server.dialects.dialect import Dialect

DIALECTS: dict[str, type[Dialect]] = {  # by vLLM's names
    "hermes": hermes.Hermes,
    "llama3_json": llama3_json.Llama3Json,
    "llama4_json": llama3_json.Llama3Json,
    "llama4_pythonic": pythonic.Pythonic,
    "mistral": mistral.Mistral,
    "pythonic": pythonic.Pythonic,
    "qwen3_coder": qwen3_coder.Qwen3Coder,
    "qwen3_xml": qwen3_coder.Qwen3Coder,
}
# Without the mark, as Llama 3.2's: `{"name": function name, "parameters": dictionary of ...}`.
_SHOWS_PARAMETERS = re.compile(r'\{"name": [^{}]*"parameters": ')
CHOICES = ("auto", *DIALECTS, "none")


def chosen(choice: str, template: str | None) -> type[Dialect] | None:
    """The dialect, None where calls stay text.

    choice: One of CHOICES. template: The model's chat template; None where it tells of no tools,
    so that the model is told of them in words, and of Hermes' dialect.
    """
    if choice == "none":
        return None
    if template is None:
        return hermes.Hermes
    return by_template(template) if choice == "auto" else DIALECTS[choice]


def by_template(template: str) -> type[Dialect]:
    """The dialect that a chat template shows its model, as far as its text tells."""
    if mistral.MARK in template:
        return mistral.Mistral
    if qwen3_coder.FUNCTION in template:
        return qwen3_coder.Qwen3Coder
    if pythonic.MARK in template:
        return pythonic.Pythonic
    if between_marks.BEGIN in template:
        return hermes.Hermes
    if llama3_json.MARK in template or _SHOWS_PARAMETERS.search(template):
        return llama3_json.Llama3Json
    return hermes.Hermes
