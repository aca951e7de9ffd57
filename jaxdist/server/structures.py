"""What an answer must conform to: the fields that say it, OpenAI's, vLLM's and others', as one."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

from jaxdist.config import UsageError
from jaxdist.inference.sampling.sampling_params import StructuredOutputsParams
from jaxdist.server.errors import APIError
from jaxdist.server.shape import Name, Shape, without

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_GUIDED = ("json", "regex", "choice", "grammar")
_ELSEWHERE = {
    "structural_tag": "give a grammar",
    "disable_additional_properties": "write additionalProperties: false into the schema",
}


class JSONSchema(Shape):
    """A named schema."""

    name: Name
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Shape):
    """OpenAI's way to say it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # llama.cpp's, of a json_object

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and (
            self.json_schema is None or self.json_schema.schema_ is None
        ):
            raise ValueError("json_schema.schema is missing; give a JSON schema")
        return self


class StructuredOutputs(Shape):
    """vLLM's; exactly one of the first five is given."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _nothing_from_elsewhere(cls, given: Any) -> Any:
        return without(_ELSEWHERE, given)


class Structured(Shape):
    """The fields of a request that say it; at most one is given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # vLLM's of old
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    regex: str | None = None  # SGLang's


def structure_field(request: Structured) -> str:
    """The field that says it; of a chat that has none, its tools."""
    return next((name for name, _ in _given(request)), "tools")


def structure_of(request: Structured) -> StructuredOutputsParams | None:
    """What it says, None where the answer is free. APIError where it says it twice, or wrongly."""
    given = list(_given(request))
    if len(given) > 1:
        raise APIError(f"{given[0][0]} and {given[1][0]} exclude each other", param=given[1][0])
    spaces = request.guided_whitespace_pattern
    if not given:
        if spaces is not None:
            name = "guided_whitespace_pattern"
            raise APIError(f"{name} is only for guided_json; leave it out", param=name)
        return None
    name, kinds = given[0]
    if spaces is not None:
        kinds.setdefault("whitespace_pattern", spaces)
    if kinds.get("choice") == []:
        raise APIError(f"{name}: choice must hold at least one text", param=name)
    try:
        return StructuredOutputsParams(**kinds)
    except UsageError as error:
        raise APIError(str(error)[:1000], param=name) from None


def _given(request: Structured) -> Iterator[tuple[str, dict[str, Any]]]:
    """(field, parameters) of each that is given."""
    form = request.response_format
    if form is not None and form.type == "json_object":
        free = form.schema_ is None
        yield "response_format", {"json_object": True} if free else {"json": form.schema_}
    elif form is not None and form.json_schema is not None:
        yield "response_format", {"json": form.json_schema.schema_}
    if request.structured_outputs is not None:
        yield "structured_outputs", _of_vllm(request.structured_outputs)
    for kind in _GUIDED:
        value = getattr(request, f"guided_{kind}")
        if value is not None:
            yield f"guided_{kind}", {kind: value}
    if request.regex is not None:
        yield "regex", {"regex": request.regex}


def _of_vllm(outputs: StructuredOutputs) -> dict[str, Any]:
    given = {name.removesuffix("_"): value for name, value in outputs if value not in (None, False)}
    kinds = [kind for kind in _KINDS if kind in given]
    if len(kinds) != 1:
        raise APIError(
            f"structured_outputs must hold exactly one of {', '.join(_KINDS)}; it holds "
            f"{len(kinds)}",
            param="structured_outputs",
        )
    return given
