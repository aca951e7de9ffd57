"""What the door may say about the device's side of the engine; no array is touched here."""

from dataclasses import dataclass

from jaxdist.config import MeshShape, ModelConfig, UsageError, limits
from jaxdist.config.checks import check_model_on_mesh
from jaxdist.inference.weights.padded_heads import with_padded_heads

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """How a model is served.

    Attributes:
        block_size: Tokens of one block of the KV pool.
        num_blocks: Blocks of one replica's pool, the null block included; None sizes the pool by
            the memory that the weights leave free.
        memory_fraction: Share of that memory to take; None is 0.9 on accelerators, 0.25 on the
            CPU, whose memory others need too, and there 2,048 tokens a sequence at most.
        max_num_seqs: Most sequences that run at a time, over all replicas.
        max_model_len: Most tokens of a sequence; None takes the model's context.
        max_row_tokens: Most tokens of one sequence in a step.
        max_drafts: Most guesses in a row of a step; 0 without speculation.
        dtype: Of weights and activations: float32 or bfloat16.
        kv_dtype: Of keys and values in the pool; None takes dtype.
        quantization: "keep" leaves the weights of a GGUF file in its blocks, of which products
            make numbers as they need them; None makes them of dtype at load.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_fraction: float | None = None
    max_num_seqs: int = 32
    max_model_len: int | None = None
    max_row_tokens: int = 512
    max_drafts: int = 0
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    quantization: str | None = None

    def __post_init__(self):
        limits.whole("block-size", self.block_size, 1)
        if self.num_blocks is not None:
            limits.whole("num-blocks", self.num_blocks, 2)
        if self.memory_fraction is not None:
            limits.number("memory-fraction", self.memory_fraction, above=0, below=1)
        limits.whole("max-num-seqs", self.max_num_seqs, 1)
        if self.max_model_len is not None:
            limits.whole("max-model-len", self.max_model_len, 1)
        limits.whole("max-row-tokens", self.max_row_tokens, 1)
        limits.whole("max-drafts", self.max_drafts, 0, 16)
        limits.choice("dtype", self.dtype, DTYPES)
        if self.kv_dtype is not None:
            limits.choice("kv-dtype", self.kv_dtype, DTYPES)
        if self.quantization is not None:
            limits.choice("quantization", self.quantization, ("keep",))

    def model_len(self, config: ModelConfig) -> int:
        """Most tokens of a sequence of this model; UsageError where max_model_len is too many."""
        most, why = _longest(config)
        if self.max_model_len is None:
            return most
        if self.max_model_len > most:
            raise UsageError(
                f"max-model-len={self.max_model_len} is longer than {why}; choose at most {most}"
            )
        return self.max_model_len

    def served(self, config: ModelConfig, mesh: MeshShape) -> ModelConfig:
        """The model as it is laid out on this mesh; weights in blocks have no room for padding."""
        return config if self.quantization else with_padded_heads(config, mesh.tp)

    def check(self, config: ModelConfig, mesh: MeshShape) -> None:
        """Refuse what this model or this mesh cannot do."""
        self.model_len(config)
        check_model_on_mesh(self.served(config, mesh), mesh)
        if config.first_k_dense_replace and mesh.pp > 1:
            raise UsageError(
                f"pp={mesh.pp}: the stages of a model whose first layers are of another kind "
                "cannot be alike; choose pp=1"
            )
        if self.max_num_seqs % mesh.dp:
            raise UsageError(
                f"max-num-seqs={self.max_num_seqs} is not divisible by dp={mesh.dp}, so the "
                f"replicas cannot share it; choose {-(-self.max_num_seqs // mesh.dp) * mesh.dp}"
            )


def _longest(config: ModelConfig) -> tuple[int, str]:
    """Most tokens to serve, and what limits them.

    Scalings whose rotations change once a text is longer than the original context would make all
    keys before void; within it they are the same for every length.
    """
    scaling = config.rope_scaling or {}
    kind, limit = scaling.get("rope_type"), config.max_position_embeddings
    if kind == "longrope":
        limit = scaling.get("original_max_position_embeddings") or limit
    if kind in ("longrope", "dynamic"):
        why = f"the {limit} tokens after which {kind} changes the rotation of the keys before"
        return min(limit, config.max_sequence_length), why
    return config.max_sequence_length, f"the model's context of {config.max_sequence_length}"
