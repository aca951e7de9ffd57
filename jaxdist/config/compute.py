"""How a step is computed: laid over the mesh, and in which number formats."""

import re
from dataclasses import dataclass

from jaxdist.config import limits
from jaxdist.config.errors import UsageError, did_you_mean

ZERO_STAGES = (0, 1, 2, 3)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb")
MOST_CHUNKS = 64
# Names given by jaxdist/models; `dots` stands for the outputs of all seven products.
SAVED_ACTIVATIONS = (
    *("dots", "qkv", "attn_out", "mlp_hidden"),
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)
POLICIES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # policy -> compute dtype


def parse_layout(name: str, layout: str) -> tuple[int, ...]:
    """The numbers of a layout such as `7,8,8,9`; UsageError, which begins with `name`."""
    words = [word.strip() for word in layout.split(",")] if isinstance(layout, str) else []
    if not words or not all(re.fullmatch(r"[1-9][0-9]{0,5}", word) for word in words):
        raise UsageError(
            f"{name}={layout!r} must be the layers of each stretch, 1 or more, as in 7,8,8,9"
        )
    return tuple(map(int, words))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the step is laid over the mesh.

    Attributes:
        zero: What is sharded over dp: 0 nothing, 1 optimizer state, 2 also gradients, 3 also
            parameters.
        schedule: Order of forward and backward passes over pp: 1f1b keeps few activations, gpipe
            all; interleaved idles less, for more ring traffic; zb puts weight gradients where a
            stage would idle, which pays with few microbatches; or the .csv file of a table of
            one's own.
        num_microbatches: Parts that a data-parallel rank's batch is cut into; their gradients are
            added up.
        num_chunks: Stretches of layers that each stage of an interleaved schedule holds.
        layout: Layers of each stretch, first to last, as in 7,8,8,9: pp x num_chunks counts; null
            spreads them evenly.
        remat: What the backward pass recomputes: none, full (all of a block), or all but a comma
            list of activations to save: dots (matrix products), qkv, attn_out, mlp_hidden, ...
        offload_activations: Whether what is saved for the backward pass waits in the host's
            memory.
        sequence_parallel: Whether activations between blocks are sharded over tp along the
            sequence.
        skip_bubbles: Whether idle pipeline slots skip their compute by a conditional; null: on the
            CPU only.
    """

    zero: int = 1
    schedule: str = "1f1b"
    num_microbatches: int = 1
    num_chunks: int = 1
    layout: str | None = None
    remat: str = "none"
    offload_activations: bool = False
    sequence_parallel: bool = False
    skip_bubbles: bool | None = None

    def __post_init__(self):
        limits.choice("parallel.zero", self.zero, ZERO_STAGES)
        if not (isinstance(self.schedule, str) and self.schedule.endswith(".csv")):
            limits.choice("parallel.schedule", self.schedule, SCHEDULES)
        limits.whole("parallel.num_microbatches", self.num_microbatches, 1)
        limits.whole("parallel.num_chunks", self.num_chunks, 1, MOST_CHUNKS)
        if self.num_chunks > 1 and self.schedule in SCHEDULES and self.schedule != "interleaved":
            raise UsageError(
                f"parallel.num_chunks={self.num_chunks} goes with interleaved schedules, not "
                f"{self.schedule}; set --parallel.schedule interleaved, or num_chunks 1"
            )
        if self.layout is not None:
            parse_layout("parallel.layout", self.layout)
        limits.text("parallel.remat", self.remat)
        for name in self.saved_activations:
            if name not in SAVED_ACTIVATIONS:
                hint = did_you_mean(name, ("none", "full", *SAVED_ACTIVATIONS))
                raise UsageError(
                    f"parallel.remat={self.remat!r}: {name!r} is not known; choose none, full, or "
                    f"a comma list out of {', '.join(SAVED_ACTIVATIONS)}{hint}"
                )
        limits.flag("parallel.offload_activations", self.offload_activations)
        limits.flag("parallel.sequence_parallel", self.sequence_parallel)
        if self.skip_bubbles is not None:
            limits.flag("parallel.skip_bubbles", self.skip_bubbles)

    @property
    def layer_counts(self) -> tuple[int, ...] | None:
        """The numbers in `layout`: layers of each stretch."""
        return None if self.layout is None else parse_layout("parallel.layout", self.layout)

    @property
    def saved_activations(self) -> tuple[str, ...]:
        """The names in `remat` where it lists activations; empty for none and full."""
        if self.remat in ("none", "full"):
            return ()
        return tuple(name.strip() for name in self.remat.split(","))


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats, by policy and, where one wants it otherwise, by role.

    Attributes:
        policy: fp32; bf16 or fp16: compute in it, everything else in fp32 (fp16 with a loss scale).
        param_dtype: Of the master parameters; null takes the policy's (so for all roles).
        compute_dtype: Of matrix products and activations.
        reduce_dtype: In which gradients are accumulated and reduced over dp.
        moment_dtype: Of the optimizer's moments.
        loss_scale_init: First loss scale (fp16).
        loss_scale_growth_interval: Steps without overflow after which the scale doubles.
        loss_scale_hysteresis: Overflows that are borne before the scale is halved.
        loss_scale_min: Floor of the scale.
    """

    policy: str = "bf16"
    param_dtype: str | None = None
    compute_dtype: str | None = None
    reduce_dtype: str | None = None
    moment_dtype: str | None = None
    loss_scale_init: float = 65536.0
    loss_scale_growth_interval: int = 2000
    loss_scale_hysteresis: int = 2
    loss_scale_min: float = 1.0

    def __post_init__(self):
        limits.choice("precision.policy", self.policy, tuple(POLICIES))
        for role in ("param_dtype", "compute_dtype", "reduce_dtype", "moment_dtype"):
            value = getattr(self, role)
            if value is None:
                continue
            value = POLICIES.get(value, value)
            limits.choice(f"precision.{role}", value, tuple(POLICIES.values()))
            if value == "float16" and role in ("param_dtype", "moment_dtype"):
                raise UsageError(
                    f"precision.{role}=float16 loses updates below 6e-8; choose float32 or "
                    f"bfloat16 (fp16 training keeps float32 masters)"
                )
            object.__setattr__(self, role, value)
        if self.reduce_dtype == "float16" and not self.needs_loss_scale:
            raise UsageError(
                "precision.reduce_dtype=float16 loses gradients below 6e-8, which only the loss "
                "scale of fp16 compute lifts; choose float32 or bfloat16, or set policy fp16"
            )
        limits.number("precision.loss_scale_min", self.loss_scale_min, above=0)
        limits.number(
            "precision.loss_scale_init",
            self.loss_scale_init,
            minimum=self.loss_scale_min,
            maximum=2.0**24,
        )
        limits.whole("precision.loss_scale_growth_interval", self.loss_scale_growth_interval, 1)
        limits.whole("precision.loss_scale_hysteresis", self.loss_scale_hysteresis, 1)

    @property
    def needs_loss_scale(self) -> bool:
        """Whether the compute dtype is float16, whose gradients underflow unscaled."""
        return (self.compute_dtype or POLICIES[self.policy]) == "float16"
