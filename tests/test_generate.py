"""The door `generate`: a run's folder in, streamed text out, one line for each mistake."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxdist import generate
from jaxdist.config.options import parse_options
from jaxdist.data.gguf_vocabulary import tokenizer_entries
from jaxdist.data.tokenizer import load_tokenizer
from jaxdist.inference.naive import Sampling
from jaxdist.inference.naive import generate as generate_ids
from jaxdist.interop.gguf.write import write_gguf
from jaxdist.interop.huggingface.write import write_huggingface
from jaxdist.models import Transformer
from jaxdist.training.model_source import open_model
from tests.small_run import small_model, write_run

PROMPT = "Zoë: "
FP32 = ("--dtype", "float32")


@pytest.fixture(scope="module")
def model() -> Transformer:
    return small_model()


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> str:
    """A run's folder with two checkpoints, the second being the model's."""
    folder = tmp_path_factory.mktemp("run")
    return write_run(folder, jax.tree.map(jnp.zeros_like, model), model)


def refused(capsys, *words: str) -> str:
    """The one line that the words are refused with."""
    with pytest.raises(SystemExit) as exit_:
        generate.main(words)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("jaxdist: error: ")
    return err


def test_writes_what_the_newest_checkpoint_says(run, model, capsys):
    words = ("--model", run, "--prompt", PROMPT, "--max-tokens", "20", "--seed", "3", *FP32)
    assert generate.main(words) == 0
    ids = list(PROMPT.encode())
    sampling = Sampling(max_tokens=20, temperature=0.8, seed=3)
    ids += generate_ids(model, ids, sampling, eos_ids=(256,), vocab_size=257)
    expected = bytes(i for i in ids if i < 256).decode(errors="replace")
    assert capsys.readouterr().out == expected + "\n"


@pytest.mark.slow
def test_a_hugging_face_folder_writes_the_same(run, tmp_path, capsys):
    words = ("--prompt", PROMPT, "--max-tokens", "5", "--temperature", "0", *FP32)
    source = open_model(run)
    write_huggingface(tmp_path / "folder", source.config, source.weights.weights())
    assert "has no tokenizer" in refused(capsys, "--model", str(tmp_path / "folder"), *words)
    (tmp_path / "folder" / "tokenizer.json").write_text(bytes_as_json())
    assert generate.main(["--model", str(tmp_path / "folder"), *words]) == 0
    written = capsys.readouterr().out
    assert generate.main(["--model", run, *words]) == 0
    assert written == capsys.readouterr().out


def bytes_as_json() -> str:
    """A tokenizer.json with the ids of the tokenizer `bytes`."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    # GPT-2's letters of the bytes: those that print stand for themselves.
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    vocabulary = {chr(byte): byte for byte in printed}
    vocabulary |= {chr(256 + n): byte for n, byte in enumerate(others)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["</s>"])
    return inner.to_str()


def test_any_of_several_ends_ends_the_text(run, model, tmp_path, capsys):
    words = ("--prompt", PROMPT, "--max-tokens", "20", "--temperature", "0", "--dtype", "float32")
    source = open_model(run)
    folder = tmp_path / "folder"
    write_huggingface(folder, source.config, source.weights.weights())
    (folder / "tokenizer.json").write_text(bytes_as_json())
    prompt = list(PROMPT.encode())
    ids = list(generate_ids(model, prompt, Sampling(max_tokens=20), vocab_size=257))
    end = ids[7]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, end]}))
    assert generate.main(["--model", str(folder), *words]) == 0
    written = bytes([*prompt, *ids[: ids.index(end)]]).decode(errors="replace")
    assert capsys.readouterr().out == written + "\n"


@pytest.mark.slow
def test_blocks_of_a_file_can_be_kept(run, tmp_path, capsys):
    words = ("--prompt", PROMPT, "--max-tokens", "5", "--temperature", "0", "--dtype", "float32")
    source, path = open_model(run), str(tmp_path / "m.gguf")
    entries = tokenizer_entries(load_tokenizer(json_tokenizer(tmp_path)), None)
    write_gguf(path, source.config, source.weights.weights(), gguf_type="q8_0", tokenizer=entries)
    keep = ("--quantization", "keep")
    assert generate.main(["--model", path, *words]) == 0
    written = capsys.readouterr().out
    assert generate.main(["--model", path, *words, *keep]) == 0
    assert capsys.readouterr().out == written
    assert "is a run, whose" in refused(capsys, "--model", run, *words, *keep)
    assert "not one of keep" in refused(capsys, "--model", path, *words, "--quantization", "drop")


def json_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").write_text(bytes_as_json())
    return str(folder)


def test_pieces_come_one_by_one(run):
    pieces = generate.write(generate.Options(model=run, prompt="a", max_tokens=5))
    assert next(pieces) == "a"
    assert len(list(pieces)) <= 6


def test_options_have_defaults_and_types():
    options = parse_options(
        generate.Options, ["--model", "1", "--prompt=-x", "--max_tokens", "5"], "generate"
    )
    assert options == generate.Options(model="1", prompt="-x", max_tokens=5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-tokens", "0"), "max-tokens=0 must be at least 1"),
        (("--max-tokens", "many"), "--max-tokens cannot be 'many'"),
        (("--temperature", "-1"), "temperature=-1.0 must be at least 0"),
        (("--temperature", "nan"), "--temperature cannot be 'nan'"),
        (("--seed", "-1"), "seed=-1 must be at least 0"),
        (("--prompt", ""), "the prompt has no tokens"),
        (("--system", "Be brief."), "--system is what a chat begins with; add --chat"),
        (("--prompt", "x" * 64), "the prompt has 64 tokens and the model's context 64"),
        (("--max-tokens", "64"), "set max-tokens to at most 63"),
        (("--model", "nowhere"), "--model nowhere is no model"),
        (("--modle", "x"), "--modle"),
    ],
)
def test_mistakes_are_one_line(words, message, run, capsys):
    assert message in refused(capsys, "--model", run, "--prompt", "x", *words)


def test_options_that_are_missing_are_named(capsys):
    assert "prompt" in refused(capsys, "--model", "x")


def test_a_run_without_a_checkpoint_is_refused(run, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text((Path(run) / "config.yaml").read_text())
    words = ("--model", str(tmp_path), "--prompt", "x", "--max-tokens", "5")
    assert "no checkpoint in" in refused(capsys, *words)
    (tmp_path / "checkpoints").mkdir()
    assert "no checkpoint in" in refused(capsys, *words)


def test_an_interrupt_ends_without_a_traceback(run, capsys, monkeypatch):
    def interrupted(options):
        yield "some"
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "write", interrupted)
    assert generate.main(["--model", run, "--prompt", "x"]) == 130
    assert capsys.readouterr().out == "some\n"
