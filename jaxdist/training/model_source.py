"""Opening a model, whatever it is: a run's folder, a Hugging Face folder, a GGUF file, a hub name.

What generation, conversion and a run's `init_from` have in common.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxdist.config import MeshShape, ModelConfig, RunConfig, UsageError
from jaxdist.config.init_from import Origin
from jaxdist.config.layers import load
from jaxdist.data.tokenizer import BYTES, FILES_IN_FOLDER, load_tokenizer
from jaxdist.data.tokenizer_files import (
    TOKENIZER,
    files_beside,
    files_of_path,
    files_of_tokenizer,
)
from jaxdist.interop import hub
from jaxdist.interop.gguf.file import GGUFFile, open_gguf
from jaxdist.interop.gguf.packed import check_packed, load_packed_parameters
from jaxdist.interop.huggingface.folder import CONFIG, HuggingFaceFolder, open_huggingface
from jaxdist.interop.source import WeightSource, load_parameters
from jaxdist.models.transformer import Transformer
from jaxdist.training import run_folder
from jaxdist.training.run_folder import ORIGIN, RunFolder, open_run


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that can be read.

    Attributes:
        path: Where it is.
        kind: "run", "Hugging Face folder" or "GGUF file".
        weights: Its weights by our names.
        tokenizer: As `load_tokenizer` takes it; None where it has none.
        dtype: In which its weights are best kept: the stored one, or float32 of packed types.
    """

    path: Path
    kind: str
    weights: WeightSource
    tokenizer: str | None
    dtype: str

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self.weights.config

    def parameters(self, like: Any) -> Any:
        """The parameters in the structure, dtypes and shardings of `like`."""
        source = self.weights
        if isinstance(source, RunFolder):
            sizes = attrgetter("padded_vocab_size", "num_attention_heads", "num_key_value_heads")
            if sizes(source.config) == sizes(like.config):
                return source.restore(like)
        return load_parameters(source, like)

    def model(self, dtype: DTypeLike = jnp.float32) -> Transformer:
        """The model on the default device."""
        return self.parameters(
            jax.eval_shape(
                lambda key: Transformer(self.config, key=key, param_dtype=dtype),
                jax.random.key(0),
            )
        )

    def packed_parameters(self, like: Any) -> Any:
        """The same with weights in the blocks of their file; a GGUF file's only."""
        return load_packed_parameters(self._in_blocks(), like)

    def check_packed(self, mesh: MeshShape) -> None:
        """Refuse a model whose weights are not in blocks, or cannot stay so on this mesh."""
        check_packed(self._in_blocks(), mesh)

    def _in_blocks(self) -> GGUFFile:
        if not isinstance(self.weights, GGUFFile):
            raise UsageError(
                f"--quantization keep: {self.path} is a {self.kind}, whose weights are not in "
                "blocks; give a .gguf file, or leave the option out"
            )
        return self.weights

    def companions(self) -> dict[str, bytes]:
        """The small files that go with it, by name: tokenizer, generation config, config.json."""
        return dict(self._companions)

    @cached_property
    def _companions(self) -> dict[str, bytes]:
        if isinstance(self.weights, HuggingFaceFolder):
            return files_beside(self.path)
        if isinstance(self.weights, GGUFFile):
            if self.tokenizer is None:
                return {}
            tokenizer = load_tokenizer(self.tokenizer)
            return files_of_tokenizer(tokenizer, self.weights.chat_template)
        files = files_beside(self.path / ORIGIN)
        if self.tokenizer not in (None, BYTES, str(self.path / ORIGIN)):
            files |= files_of_path(Path(os.path.expanduser(self.tokenizer)))
        return files


def open_model(name: str | Path, option: str = "--model") -> ModelSource:
    """Open what `name` is. UsageError, which begins with `option`, where it is nothing known."""
    path = Path(os.path.expanduser(name))
    if (path / run_folder.CONFIG).is_file():
        run = open_run(path)
        return ModelSource(
            path=path, kind="run", weights=run, tokenizer=run.tokenizer, dtype=run.dtype
        )
    if (path / CONFIG).is_file():
        return _huggingface(path)
    if path.is_file():
        return _gguf(path)
    if not path.exists() and hub.is_hub_name(str(name)):
        return _huggingface(hub.download(str(name)))
    if path.is_dir():
        problem = f"there is neither {run_folder.CONFIG} nor {CONFIG} in it"
    elif path.exists():
        problem = "it is a pipe or a device"
    else:
        problem = "there is no such file or folder"
    raise UsageError(
        f"{option} {name} is no model: {problem}; give the folder of a training run, a Hugging "
        "Face folder, a .gguf file, or a name on the hub such as owner/model"
    )


def read_origin(init_from: str, run_dir: Path) -> Origin:
    """What a run takes over from `init_from`.

    A run that has started stands on its own: its folder says it, and the origin may be gone.
    """
    if (run_dir / run_folder.CONFIG).is_file():
        started = load(run_dir / run_folder.CONFIG)
        if started.init_from == init_from:
            tokenizer = started.data.tokenizer
            if tokenizer != BYTES and not os.path.exists(os.path.expanduser(tokenizer)):
                tokenizer = str(run_dir / ORIGIN)
            return Origin(model=started.model, tokenizer=tokenizer)
    source = open_model(init_from, "--init-from")
    return Origin(model=source.config, tokenizer=source.tokenizer)


def keep_origin(config: RunConfig) -> None:
    """Copy into the run's folder what belongs to its tokenizer and the model it started from."""
    target = config.run_dir / ORIGIN
    name, files = config.data.tokenizer, {}
    if config.init_from is not None:
        source = open_model(config.init_from, "--init-from")
        same = name == source.tokenizer
        files = {k: v for k, v in source.companions().items() if same or k not in TOKENIZER}
    if name != BYTES and not files.keys() & {*TOKENIZER}:
        files |= files_of_path(Path(os.path.expanduser(name))) or files_of_tokenizer(
            load_tokenizer(name)
        )
    for file, content in files.items():
        target.mkdir(parents=True, exist_ok=True)
        (target / file).write_bytes(content)


def _huggingface(folder: Path) -> ModelSource:
    weights = open_huggingface(folder)
    has_tokenizer = any(list(folder.glob(pattern)) for pattern in FILES_IN_FOLDER)
    return ModelSource(
        path=folder,
        kind="Hugging Face folder",
        weights=weights,
        tokenizer=str(folder) if has_tokenizer else None,
        dtype=weights.dtype,
    )


def _gguf(path: Path) -> ModelSource:
    weights = open_gguf(path)
    stored = {"BF16": "bfloat16", "F16": "float16"}
    most = next((name for name, _ in weights.types.most_common() if name != "F32"), "F32")
    has_tokenizer = "tokenizer.ggml.tokens" in weights.header.metadata
    return ModelSource(
        path=path,
        kind="GGUF file",
        weights=weights,
        tokenizer=str(path) if has_tokenizer else None,
        dtype=stored.get(most, "float32"),
    )
