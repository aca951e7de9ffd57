from pathlib import Path

import pytest

from jaxdist.config import RunConfig, UsageError
from jaxdist.config.command_line import load, parse

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


def parsed(line: str) -> RunConfig:
    return parse(line.split(), "jaxdist train")


def test_everyday_flags() -> None:
    config = parsed(
        f"--config {QUICKSTART} --mesh 2x2x2 --simulate --output-dir o --resume never "
        "--seed 7 --dry-run"
    )
    assert config.mesh == "2x2x2" and config.simulate and config.dry_run
    assert (config.output_dir, config.resume, config.seed) == ("o", "never", 7)
    assert config.name == "quickstart"


def test_every_kind_of_value() -> None:
    config = parsed(
        "--optimizer.learning_rate 1e-3 --eval.every null --train.steps 40 "
        "--model.tie_word_embeddings false --parallel.sequence_parallel --parallel.skip_bubbles "
        "true --parallel.remat qkv,attn_out --profile.steps 10:12 --optimizer.max_grad_norm=null "
        "--data.tokenizer 123 --data.sources a.txt b.txt"
    )
    assert config.optimizer.learning_rate == 1e-3 and config.eval.every is None
    assert config.model.tie_word_embeddings is False and config.parallel.sequence_parallel
    assert config.parallel.skip_bubbles is True and config.parallel.remat == "qkv,attn_out"
    assert config.profile.steps == "10:12" and config.optimizer.max_grad_norm is None
    assert config.data.tokenizer == "123" and config.data.sources == ("a.txt", "b.txt")


def test_mappings() -> None:
    source = "{path: b, weight: 2}"
    scaling = "{rope_type: linear, factor: 2.0}"
    config = parse(["--data.sources", source, "--model.rope_scaling", scaling], "jaxdist train")
    assert config.data.sources == ({"path": "b", "weight": 2},)
    assert config.model.rope_scaling == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("words", ["--mesh -1x2x2", "--mesh=-1x2x2", "--mesh dp=-1,pp=2,tp=2"])
def test_minus_one_in_the_mesh(words: str) -> None:
    assert parsed(words).mesh_shape.degrees == (-1, 2, 2)


def test_underscores_and_hyphens() -> None:
    assert parsed("--output_dir o --train.global-batch-size 4").train.global_batch_size == 4


def test_the_last_of_two_wins() -> None:
    assert parsed("--seed 1 --seed 2").seed == 2


def test_options_over_the_file_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("train: {steps: 3}\nseed: 4")
    line = f"--seed 9 --config {QUICKSTART} --config {tmp_path / 'more.yaml'}"
    config = parsed(line)
    assert (config.seed, config.train.steps, config.model.hidden_size) == (9, 3, 128)
    assert config.name == "more"


def test_preset_over_the_file() -> None:
    config = parsed(f"--config {QUICKSTART} --model.preset smollm2_135m --model.vocab_size 500")
    assert (config.model.hidden_size, config.model.vocab_size) == (576, 500)


@pytest.mark.parametrize("mesh", ["1x1x1", "8x1x1", "4x1x2", "1x1x8", "1x8x1", "2x4x1", "2x2x2"])
def test_a_small_shape_over_the_quickstart_fits_every_mesh(mesh: str) -> None:
    config = parsed(
        f"--config {QUICKSTART} --simulate --mesh {mesh} --model.num_hidden_layers 8 "
        "--model.hidden_size 64 --model.intermediate_size 128 --model.num_attention_heads 8 "
        "--model.num_key_value_heads 8 --train.sequence_length 64 --train.global_batch_size 16 "
        "--precision.policy fp32 --train.steps 5"
    )
    assert config.model.head_dim == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--optimizer.learning_rat 1e-3",
            "--optimizer.learning_rat is not an option; did you mean --optimizer.learning_rate?",
        ),
        ("--zero 1", "did you mean --parallel.zero"),
        ("--train.step 5", "did you mean --train.steps"),
        ("--train 5", "--train is not an option"),
        ("--qqq", "--help lists them"),
        ("--train.steps many", "train.steps='many' must be a whole number"),
        ("--train.steps 1.5", "train.steps='1.5' must be a whole number"),
        ("--train.steps -3", "train.steps=-3 must be at least 1"),
        ("--train.steps", "--train.steps needs a value"),
        ("--train.steps --seed 1", "--train.steps needs a value"),
        ("--data.sources", "--data.sources needs a value"),
        ("--optimizer.learning_rate nan", "learning_rate='nan' must be a finite number"),
        ("--optimizer.learning_rate .nan", "learning_rate=nan must be a finite number"),
        ("--optimizer.learning_rate inf", "optimizer.learning_rate"),
        ("--model.rope_scaling linear", "rope_scaling='linear' must be a mapping or null"),
        ("--log.progress maybe", "log.progress='maybe' must be true or false"),
        ("--simulate maybe --mesh 1x1x1", "simulate='maybe' must be true or false"),
        ("stray", "'stray' belongs to no option"),
        ("--seed 1 stray", "'stray' belongs to no option"),
        ("-x", "'-x' belongs to no option"),
        ("--config /nonexistent.yaml", "/nonexistent.yaml cannot be read"),
        ("--config", "--config needs a value"),
        ("--model.preset lama3_8b", "did you mean llama3_8b"),
        ("--mesh 2x2", "mesh '2x2' has 2 degrees"),
    ],
)
def test_refused_in_one_line(words: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parsed(words)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_print_config_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"--config {QUICKSTART} --mesh dp=2,tp=4 --simulate --train.steps 12"
    with pytest.raises(SystemExit, match="0"):
        parsed(f"{line} --print-config")
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert load(path) == parsed(line) == parsed(f"--config {path}")


def test_help_shows_sections_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parsed("--help")
    text = capsys.readouterr().out
    assert "--print-config" in text and "--optimizer.learning_rate X" in text
    assert "5 % of train.steps" in text and "[0.0003]" in text
