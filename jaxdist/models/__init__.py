"""The decoder: flax.nnx Modules as plain pytrees, which speak logical axes and know no mesh."""

from jaxdist.models.layers import Context
from jaxdist.models.remat import DOT_NAMES, rematerialised
from jaxdist.models.transformer import Block, Transformer, default_context

__all__ = ["DOT_NAMES", "Block", "Context", "Transformer", "default_context", "rematerialised"]
