"""From text to rows of tokens by step: tokenizers, sources, packing and the loader. numpy only."""

from jaxdist.data.loader import Loader, make_loader
from jaxdist.data.packing import Batch
from jaxdist.data.prefetch import Prefetch, prefetch
from jaxdist.data.tokenizer import Tokenizer, check_fits, load_tokenizer

__all__ = [
    "Batch",
    "Loader",
    "Prefetch",
    "Tokenizer",
    "check_fits",
    "load_tokenizer",
    "make_loader",
    "prefetch",
]
