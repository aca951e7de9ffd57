"""Which family a model belongs to, by the name it has or by what it is."""

from dataclasses import fields
from typing import Any

from jaxdist.config import ModelConfig
from jaxdist.config.errors import UsageError, did_you_mean
from jaxdist.interop.huggingface.families import FAMILIES
from jaxdist.interop.huggingface.family import Family

# What any model may have its own value of; every other field is its family's matter.
FREE = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "sliding_window",
    "sliding_window_pattern",
    "rope_theta",
    "rope_scaling",
    "tie_word_embeddings",
    "initializer_range",
    "vocab_multiple",
    "preset",
}


def family_of(architecture: Any, where: str) -> Family:
    """The family by its name; UsageError where it is not in the table."""
    if architecture not in FAMILIES:
        hint = did_you_mean(architecture, FAMILIES) if isinstance(architecture, str) else ""
        raise UsageError(
            f"{where}: the architecture {architecture!r} is not one of {', '.join(FAMILIES)}{hint}"
        )
    return FAMILIES[architecture]


def expresses(family: Family, config: ModelConfig) -> bool:
    """Whether a config can be written as a model of this family."""
    return not _differing(family, config)


def _differing(family: Family, config: ModelConfig) -> list[str]:
    """The fields of a config that a family's models cannot have as they are."""
    switched: dict[str, set[bool]] = {}
    for name, key in family.switches.items():
        switched.setdefault(key, set()).add(getattr(config, name))
    wrong = [n for n, value in family.implies.items() if getattr(config, n) != value]
    wrong += [n for n, key in family.switches.items() if len(switched[key]) > 1]
    wrong += [
        f.name
        for f in fields(ModelConfig)
        if f.name not in FREE | family.named and getattr(config, f.name) != f.default
    ]
    if bool(config.num_experts) != ("num_experts" in family.keys):
        wrong.append("num_experts")
    square = (config.num_attention_heads, config.hidden_size // config.num_attention_heads)
    if config.position_embedding == "learned":
        wrong += [
            name
            for name, value in zip(("num_key_value_heads", "head_dim"), square, strict=True)
            if getattr(config, name) != value
        ]
    if config.sliding_window is not None and family.window == "never":
        wrong.append("sliding_window")
    if config.sliding_window_pattern is not None and family.window != "by layer":
        wrong.append("sliding_window_pattern")
    return wrong


def architecture_for(config: ModelConfig, preferred: Any = None) -> str:
    """The architecture a config is written as, `preferred` if it can be."""
    for name in (preferred, *FAMILIES):
        if name in FAMILIES and expresses(FAMILIES[name], config):
            return name
    # Said as what hinders the family that comes nearest.
    name = min(FAMILIES, key=lambda name: len(_differing(FAMILIES[name], config)))
    given = ", ".join(f"{n}={getattr(config, n)}" for n in _differing(FAMILIES[name], config))
    raise UsageError(
        f"no architecture of {', '.join(FAMILIES)} expresses this model (of {name} what differs "
        f"is {given}); such a model stays in its run's folder"
    )
