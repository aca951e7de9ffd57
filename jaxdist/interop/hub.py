"""Models by their name on the Hugging Face hub: downloaded once, then found in its cache."""

import re
from pathlib import Path

from jaxdist.config.errors import UsageError, did_you_mean

NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
PATTERNS = ("*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt")


def is_hub_name(name: str) -> bool:
    """Whether `name` reads like owner/model."""
    return NAME.fullmatch(name) is not None


def download(name: str) -> Path:
    """The folder of the model `name`.

    Raises UsageError where `name` reads like a path into a folder that is here, the package is
    missing, the network is not there (and the model not in the cache), or the hub refuses.
    """
    folder = Path(name).parent
    if folder.is_dir():  # a path that was meant for one of its neighbours
        there = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        hint = did_you_mean(Path(name).name, there) or f"; it holds {', '.join(there[:8])}"
        raise UsageError(f"there is no {name}: {folder} has nothing of that name{hint}")
    try:
        import huggingface_hub
    except ImportError:
        raise UsageError(
            f"{name} is no folder here, and to fetch it from the hub needs the package "
            "huggingface_hub: pip install 'jaxdist[hub]'"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(PATTERNS)))
    except Exception as error:  # the package raises its own, those of its HTTP library, and OSError
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"{name} is no folder here, and could not be fetched from the hub: {reason}; give a "
            "Hugging Face folder, a .gguf file or a run's folder"
        ) from error
