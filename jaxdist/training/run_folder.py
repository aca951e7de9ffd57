"""The folder that a training run leaves, as the doors that use a trained model read it."""

from pathlib import Path

import jax

from jaxdist.config import RunConfig, UsageError
from jaxdist.models.transformer import Transformer
from jaxdist.precision import Policy
from jaxdist.training.checkpoint import Checkpointer


def restore_model(run: Path, config: RunConfig) -> Transformer:
    """The parameters of the newest complete checkpoint under `run`, on the default device."""
    directory = run / "checkpoints"
    checkpoints = Checkpointer(directory, None)
    step = checkpoints.latest_step()
    if step is None:
        raise UsageError(f"no checkpoint in {directory}; train until one is complete")
    dtype = Policy.from_config(config.precision).param_dtype
    abstract = jax.eval_shape(
        lambda key: Transformer(config.model, key=key, param_dtype=dtype), jax.random.key(0)
    )
    model = checkpoints.restore_params(step, abstract)
    checkpoints.close()
    return model
