"""What all requests and their parts have in common."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints

Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Shape(BaseModel):
    """Types are strict: "1" is no number. Fields that are not known are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


def without(names: Mapping[str, str], given: Any) -> Any:
    """`given`, which names none of these fields. ValueError, which says what to do instead."""
    for name, instead in names.items():
        if isinstance(given, dict) and given.get(name) not in (None, False, [], {}):
            raise ValueError(f"{name} is not supported; {instead}")
    return given


def field_names(kind: type[Shape]) -> set[str]:
    """The names of the fields of all shapes that were made of `kind`."""
    fields = {field.alias or name for name, field in kind.model_fields.items()}
    return fields.union(*map(field_names, kind.__subclasses__()))
