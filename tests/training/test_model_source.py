"""Runs that start from a given model: its weights, its tokenizer, and no need of it afterwards."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxdist import convert, train
from jaxdist.config import DataConfig, ModelConfig, ParallelConfig, RunConfig, UsageError
from jaxdist.data.tokenizer import load_tokenizer
from jaxdist.interop.huggingface.write import write_huggingface
from jaxdist.interop.leaves import STACK, leaf_shapes
from jaxdist.training.model_source import keep_origin, open_model
from jaxdist.training.setup import Setup

slow = pytest.mark.slow
MODEL = ModelConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
ROOT = Path(__file__).parents[2]


def tokenizer_json() -> bytes:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["</s>"])
    return inner.to_str().encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def weights():
        rng = np.random.default_rng(0)
        for name, shape in leaf_shapes(MODEL).items():
            mean = 1.0 if "norm" in name else 0.0
            for layer in range(2) if name.startswith(STACK) else [None]:
                size = shape if layer is None else shape[1:]
                yield name, layer, (mean + 0.05 * rng.standard_normal(size)).astype(np.float32)

    folder = tmp_path_factory.mktemp("init_from") / "model"
    companions = {"tokenizer.json": tokenizer_json(), "generation_config.json": b"{}"}
    write_huggingface(folder, MODEL, weights(), companions=companions)
    return folder


def test_the_state_begins_with_its_weights_in_their_shards(folder):
    config = RunConfig(
        model=MODEL, mesh="2x2x2", init_from=str(folder), parallel=ParallelConfig(zero=3)
    )
    setup = Setup.of(config)
    state = setup.initial_state()
    expected = open_model(folder).model()
    jax.tree.map(np.testing.assert_array_equal, state.params, expected)
    target = setup.layout.target(setup.mesh)
    jax.tree.map(lambda a, t: _same_place(a, t), state, target)


def _same_place(array, target):
    assert array.sharding == target.sharding and array.dtype == target.dtype


def test_weights_of_another_model_are_refused(folder):
    other = replace(MODEL, intermediate_size=32)
    setup = Setup.of(RunConfig(model=other, mesh="1x1x1", init_from=str(folder)))
    with pytest.raises(UsageError, match="model.intermediate_size=32, but 64 there"):
        setup.initial_state()


def test_what_came_with_it_is_kept(folder, tmp_path):
    data = DataConfig(tokenizer=str(folder))
    config = RunConfig(
        model=MODEL, data=data, init_from=str(folder), output_dir=str(tmp_path / "run")
    )
    keep_origin(config)
    names = sorted(path.name for path in (tmp_path / "run" / "origin").iterdir())
    assert names == ["config.json", "generation_config.json", "tokenizer.json"]
    kept = load_tokenizer(str(tmp_path / "run" / "origin"))
    assert kept.fingerprint == load_tokenizer(str(folder)).fingerprint
    own = replace(config, data=DataConfig(tokenizer="bytes"), output_dir=str(tmp_path / "bytes"))
    keep_origin(own)
    assert not (tmp_path / "bytes" / "origin" / "tokenizer.json").exists()


@slow
def test_train_then_resume_without_it_then_export(folder, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    origin, run = tmp_path / "origin", tmp_path / "run"
    shutil.copytree(folder, origin)
    words = [
        "--init-from", str(origin), "--mesh", "1x1x2", "--output-dir", str(run),
        "--precision.policy", "fp32", "--train.global_batch_size", "4",
        "--train.sequence_length", "32", "--train.steps", "4", "--log.progress", "false",
        "--log.tensorboard", "false", "--data.cache_dir", str(tmp_path / "cache"),
    ]  # fmt: skip
    assert train.main([*words, "--train.stop_after", "2", "--checkpoint.every", "2"]) == 0
    shutil.rmtree(origin)
    assert train.main(words) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert convert.main([str(run), str(tmp_path / "out")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = np.random.default_rng(0).integers(0, 300, (2, 16))
    positions = np.broadcast_to(np.arange(16), (2, 16))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    ours = jax.jit(lambda model: model(tokens, positions))(open_model(run).model())
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)
    text = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert text("Zoë").input_ids == load_tokenizer(str(folder)).encode("Zoë")


@slow
@pytest.mark.skipif(
    not (ROOT / "models/smollm2-135m-instruct.gguf").is_file(), reason="scripts/fetch_model.sh"
)
def test_smollm2_is_finetuned_and_runs_in_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    command = [
        sys.executable, "-m", "jaxdist.train", "--config", "configs/finetune_smollm2.yaml",
        "--output-dir", str(tmp_path / "run"), "--train.steps", "8", "--eval.every", "2",
        "--eval.batches", "1", "--train.sequence_length", "128", "--train.global_batch_size", "2",
        "--parallel.num_microbatches", "1", "--optimizer.warmup_steps", "1",
        "--checkpoint.every", "8", "--log.progress", "false",
        "--data.cache_dir", str(tmp_path / "cache"),
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert rows[0]["loss"] < 5  # the weights are those of a trained model
    held_out = [row["val_loss"] for row in rows if "val_loss" in row]  # the same rows each time
    assert held_out[-1] < held_out[0] - 0.05, held_out
    out = tmp_path / "out"
    assert convert.main([str(tmp_path / "run"), str(out), "--dtype", "bfloat16"]) == 0
    shutil.rmtree(tmp_path / "run")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    text = transformers.AutoTokenizer.from_pretrained(out)
    ids = text("ROMEO:\nO, she doth teach", return_tensors="pt").input_ids
    with torch.no_grad():
        expected = theirs(ids).logits.numpy()
    positions = np.arange(ids.shape[1])[None]
    ours = jax.jit(lambda model: model(ids.numpy(), positions))(open_model(out).model())
    np.testing.assert_allclose(ours, expected, atol=1e-3, rtol=0)


def test_a_pipe_is_no_model_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(UsageError, match="--init-from .*a.gguf is no model: it is a pipe"):
        open_model(tmp_path / "a.gguf", "--init-from")
