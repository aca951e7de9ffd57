"""Runs, Hugging Face folders and GGUF files into one another."""

import io
import json

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxdist import convert as door
from jaxdist.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    UsageError,
)
from jaxdist.config.layers import save_config
from jaxdist.interop.huggingface.write import write_huggingface
from jaxdist.interop.leaves import STACK, leaf_shapes
from jaxdist.training.checkpoint import Checkpointer
from jaxdist.training.conversion import convert
from jaxdist.training.model_source import open_model, read_origin

MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def weights():
    rng = np.random.default_rng(0)
    for name, shape in leaf_shapes(MODEL).items():
        if name.startswith(STACK):
            for layer in range(MODEL.num_hidden_layers):
                yield name, layer, rng.standard_normal(shape[1:], np.float32)
        else:
            yield name, None, rng.standard_normal(shape, np.float32)


def everything(path):
    return {
        (name, layer): np.array(array) for name, layer, array in open_model(path).weights.weights()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert") / "folder"
    companions = {
        "tokenizer_config.json": b'{"chat_template": "x"}',
        "generation_config.json": b'{"eos_token_id": 3}',
        "config.json": b'{"architectures": ["MistralForCausalLM"], "bos_token_id": 1}',
    }
    write_huggingface(folder, MODEL, weights(), companions=companions)
    return folder


def quiet(source, target, **options):
    out = io.StringIO()
    console = Console(file=out, width=200)
    convert(str(source), str(target), console=console, **options)
    return out.getvalue()


def test_there_and_back_through_a_gguf_file(folder, tmp_path):
    said = quiet(folder, tmp_path / "model.gguf", gguf_type="f32")
    assert "parameters, 2 layers x 32, 61 tokens" in said and "f32" in said
    quiet(tmp_path / "model.gguf", tmp_path / "back")
    before, after = everything(folder), everything(tmp_path / "back")
    assert before.keys() == after.keys()
    for key, array in before.items():
        np.testing.assert_array_equal(array, after[key])


def test_a_folder_keeps_what_came_with_it(folder, tmp_path):
    quiet(folder, tmp_path / "copy", dtype="bfloat16")
    read = lambda name: json.loads((tmp_path / "copy" / name).read_text())  # noqa: E731
    config = read("config.json")
    assert config["architectures"] == ["MistralForCausalLM"]
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 3)
    assert config["torch_dtype"] == open_model(tmp_path / "copy").dtype == "bfloat16"
    assert read("generation_config.json") == {"eos_token_id": 3}
    assert read("tokenizer_config.json") == {"chat_template": "x"}


def test_a_run_becomes_a_folder(folder, tmp_path):
    source = open_model(folder)
    run = tmp_path / "run"
    config = RunConfig(model=MODEL, data=DataConfig(tokenizer="bytes"), init_from=str(folder))
    save_config(config, run / "config.yaml")
    checkpoints = Checkpointer(run / "checkpoints", CheckpointConfig())
    checkpoints.save(1, {"params": source.model()}, {})
    checkpoints.close()
    quiet(run, tmp_path / "out")
    before, after = everything(folder), everything(tmp_path / "out")
    for key, array in before.items():
        np.testing.assert_array_equal(array, after[key])
    # A run that has started no longer needs what it started from.
    assert read_origin(str(folder), run).model == MODEL
    with pytest.raises(UsageError, match="--init-from nowhere is no model"):
        read_origin("nowhere", run)


def test_of_a_run_the_averaged_weights_where_they_are_asked_for(folder, tmp_path):
    model, run = open_model(folder).model(), tmp_path / "run"
    with pytest.raises(UsageError, match="is a Hugging Face folder; only runs keep an average"):
        quiet(folder, tmp_path / "out", ema=True)
    for decay in (None, 0.9):
        optimizer = OptimizerConfig(ema_decay=decay)
        config = RunConfig(model=MODEL, data=DataConfig(tokenizer="bytes"), optimizer=optimizer)
        save_config(config, run / "config.yaml")
        if decay is None:
            with pytest.raises(UsageError, match="without optimizer.ema_decay"):
                quiet(run, tmp_path / "out", ema=True)
    checkpoints = Checkpointer(run / "checkpoints", CheckpointConfig())
    average = jax.tree.map(lambda leaf: 2 * leaf, model)
    checkpoints.save(1, {"params": model, "ema": average}, {})
    checkpoints.close()
    assert door.main([str(run), str(tmp_path / "out"), "--ema"]) == 0
    before, after = everything(folder), everything(tmp_path / "out")
    for key, array in before.items():
        np.testing.assert_array_equal(2 * array, after[key])


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("here", {}, "is there already; --force replaces it"),
        ("here", {"force": True}, "is no Hugging Face folder, so it is not replaced"),
        ("new.gguf", {"dtype": "bfloat16"}, "say --gguf-type"),
        ("new", {"gguf_type": "f16"}, "let TARGET end in .gguf"),
        ("new", {"dtype": "float8"}, "dtype 'float8' is not one of"),
        ("new.gguf", {"gguf_type": "q8"}, "did you mean q8_0"),
    ],
)
def test_refusals_write_nothing(target, options, message, folder, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "precious").touch()
    with pytest.raises(UsageError, match=message):
        quiet(folder, tmp_path / target, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert (tmp_path / "here" / "precious").exists()


def test_force_replaces_a_model_but_not_the_source(folder, tmp_path):
    quiet(folder, tmp_path / "copy")
    quiet(folder, tmp_path / "copy", force=True)
    with pytest.raises(UsageError, match="holds SOURCE"):
        quiet(folder, folder.parent, force=True)
    assert len(everything(tmp_path / "copy")) == len(everything(folder))


def test_the_door(folder, tmp_path, capsys):
    assert door.main([str(folder), str(tmp_path / "new"), "--dtype", "float16"]) == 0
    assert open_model(tmp_path / "new").dtype == "float16"
    for words, message in (
        ([str(folder)], "TARGET"),
        ([str(folder), "x", "--forse"], "--forse"),
        (["nowhere", "x"], "SOURCE nowhere is no model: there is no such file"),
        ([str(tmp_path), "x"], "there is neither config.yaml nor config.json in it"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            door.main(words)
        assert exit_.value.code == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and message in err
