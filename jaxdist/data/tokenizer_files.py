"""The small files that go with a model: its tokenizer, chat template and generation config.

They are copied as they came where there are files, and written anew for a tokenizer that lies in a
GGUF file. Either way `load_tokenizer` and transformers read the folder that holds them.
"""

import json
from pathlib import Path
from typing import Any

from jaxdist.config import UsageError
from jaxdist.config.json_text import read_object
from jaxdist.data.tokenizer import JsonTokenizer, SentencePieceTokenizer, Tokenizer

TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
ABOUT = ("generation_config.json", "config.json")


def files_beside(folder: Path) -> dict[str, bytes]:
    """Content, by name, of the small files in a Hugging Face folder."""
    found = (folder / name for name in (*TOKENIZER, *ABOUT))
    return {path.name: path.read_bytes() for path in found if path.is_file()}


def files_of_path(path: Path) -> dict[str, bytes]:
    """Content, by name, of a tokenizer file and what belongs to it; nothing for a GGUF file."""
    if path.is_dir():
        return {name: text for name, text in files_beside(path).items() if name in TOKENIZER}
    if path.name not in TOKENIZER:
        kind = {".json": "tokenizer.json", ".model": "tokenizer.model"}.get(path.suffix)
        return {kind: path.read_bytes()} if kind else {}
    return files_of_path(path.parent)


def files_of_tokenizer(tokenizer: Tokenizer, chat_template: str | None = None) -> dict[str, bytes]:
    """Content, by name, of the files that say the same as a tokenizer in memory."""
    inner: Any = getattr(tokenizer, "_inner", None)
    if isinstance(tokenizer, JsonTokenizer):
        files = {"tokenizer.json": _json_of(tokenizer, inner).encode()}
        piece: Any = inner.id_to_token
        kind = "PreTrainedTokenizerFast"
    elif isinstance(tokenizer, SentencePieceTokenizer):
        files = {"tokenizer.model": inner.serialized_model_proto()}
        piece, kind = inner.id_to_piece, "LlamaTokenizer"
    else:
        return {}
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    known = {name: i for name, i in ids.items() if i is not None}
    settings = {
        "tokenizer_class": kind,
        **{f"{name}_token": piece(i) for name, i in known.items()},
        "add_bos_token": tokenizer.bos_id is not None,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    files["tokenizer_config.json"] = _text(settings)
    files["generation_config.json"] = _text({f"{name}_token_id": i for name, i in known.items()})
    return files


def _json_of(tokenizer: JsonTokenizer, inner: Any) -> str:
    """tokenizer.json, which says in its template that texts open with bos."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import processors

    copy = Inner.from_str(inner.to_str())
    if tokenizer.bos_id is not None and not copy.encode("").ids:
        bos = copy.id_to_token(tokenizer.bos_id)
        copy.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_id)]
        )
    return copy.to_str(pretty=True)


def _text(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def chat_template(files: dict[str, bytes]) -> str | None:
    """The Jinja template of chats among these files, which is untrusted text; None for none.

    Of several named ones it is the default.
    """
    if "chat_template.jinja" in files:
        try:
            return files["chat_template.jinja"].decode()
        except UnicodeDecodeError:
            raise UsageError("chat_template.jinja of the model is not a text in UTF-8") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        where = f"{name} of the model"
        template = read_object(files.get(name, b"{}"), where).get("chat_template")
        if isinstance(template, list):
            named = [entry for entry in template if isinstance(entry, dict)]
            default = [entry for entry in named if entry.get("name") == "default"]
            template = default[-1].get("template") if default else None
        if isinstance(template, str):
            return template
    return None
