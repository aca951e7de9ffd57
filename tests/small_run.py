"""A run's folder with a tiny model of random weights, over the tokenizer `bytes`."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import CheckpointConfig, DataConfig, ModelConfig, RunConfig, TrainConfig
from jaxdist.config.command_line import to_yaml
from jaxdist.models import Transformer
from jaxdist.training.checkpoint import Checkpointer
from jaxdist.training.run_folder import ORIGIN


def small_model() -> Transformer:
    """Has more rows in its tables than the tokenizer has tokens."""
    config = ModelConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), jnp.float32),
        jax.eval_shape(lambda key: Transformer(config, key=key), jax.random.key(0)),
    )


def write_run(folder: Path, *models: Transformer, generation: dict[str, Any] | None = None) -> str:
    """A run whose checkpoints are these, the last being the newest; its path.

    generation: What the generation_config.json of its origin says.
    """
    config = RunConfig(
        model=models[0].config,
        train=TrainConfig(sequence_length=64),
        data=DataConfig(tokenizer="bytes"),
    )
    (folder / "config.yaml").write_text(to_yaml(config))
    checkpointer = Checkpointer(folder / "checkpoints", CheckpointConfig())
    for step, model in enumerate(models, start=1):
        checkpointer.save(step, {"params": model}, {})
    checkpointer.close()
    if generation is not None:
        (folder / ORIGIN).mkdir()
        (folder / ORIGIN / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)
