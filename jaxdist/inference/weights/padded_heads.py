"""Heads of zeros for a tp that does not divide a model's heads.

A padded head's keys and values are 0, so it gives 0, which the output projection drops: the model
computes what it did. It pays where the members of tp would else be idle, as the cores of a CPU.
"""

from dataclasses import replace

from jaxdist.config import ModelConfig

MOST = 4 / 3  # times as many heads


def with_padded_heads(config: ModelConfig, tp: int) -> ModelConfig:
    """`config` with so many heads that tp divides them, those beyond its own behind its own.

    As it is where tp divides or repeats them, or where padding would change the result (a norm over
    all heads) or cost more than `MOST`.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    fits = heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    normed_together = config.qk_norm and config.qk_norm_width == "all"
    padded = -(-kv_heads // tp) * tp
    if fits or normed_together or config.kv_lora_rank or padded > MOST * kv_heads:
        return config
    return replace(
        config,
        num_attention_heads=padded * (heads // kv_heads),
        num_key_value_heads=padded,
    )
