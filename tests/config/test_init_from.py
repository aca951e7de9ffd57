"""What a run takes over from the model it starts from."""

from pathlib import Path

import pytest

from jaxdist.config import ModelConfig, RunConfig, UsageError
from jaxdist.config.command_line import parse
from jaxdist.config.init_from import Origin, check_same_weights
from jaxdist.config.layers import build

MODEL = ModelConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    rope_theta=1e5,
    max_position_embeddings=512,
)


def parsed(*words: str, tokenizer: str | None = "there") -> RunConfig:
    def read_origin(init_from: str, run_dir: Path) -> Origin:
        assert (init_from, run_dir) == ("there", Path("runs/run"))
        return Origin(model=MODEL, tokenizer=tokenizer)

    return parse(["--init-from", "there", *words], "jaxdist train", read_origin)


def test_model_and_tokenizer_come_from_there():
    config = parsed()
    assert (config.model, config.data.tokenizer, config.init_from) == (MODEL, "there", "there")


def test_a_tokenizer_of_ones_own_wins():
    assert parsed("--data.tokenizer", "bytes").data.tokenizer == "bytes"
    assert parsed(tokenizer=None).data.tokenizer == "bytes"


def test_fields_that_fit_the_weights_may_be_changed():
    config = parsed("--model.max_position_embeddings", "1024", "--model.rope_theta", "2e5")
    assert config.model.max_position_embeddings == 1024 and config.model.rope_theta == 2e5
    assert config.model.hidden_size == 64
    assert parsed("--model.hidden_size", "64").model == MODEL


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model.hidden_size", "128"), "model.hidden_size=128, but 64 there"),
        (("--model.tie_word_embeddings", "true"), "model.tie_word_embeddings=True, but False"),
        (("--model.preset", "smollm2_135m"), "model.vocab_size=49152, but 300 there"),
    ],
)
def test_fields_that_do_not_are_named(words, message):
    with pytest.raises(UsageError, match=f"init_from=there holds another model: .*{message}"):
        parsed(*words)


def test_a_preset_must_be_the_same_model_in_its_rope_too():
    with pytest.raises(UsageError, match="model.rope_theta=10000.0, but 100000.0 there"):
        parsed("--model.preset", "tiny")


def test_the_weights_are_checked_whatever_the_config_says():
    check_same_weights(MODEL, MODEL, "there")
    other = ModelConfig.from_preset("tiny")
    with pytest.raises(UsageError, match="init_from=there holds another model"):
        check_same_weights(other, MODEL, "there")


def test_an_empty_name_is_refused():
    with pytest.raises(UsageError, match="init_from=''"):
        RunConfig(init_from="")


@pytest.mark.parametrize(
    ("values", "said"),
    [({"init_from": 5}, "init_from=5"), ({"init_from": "there", "output_dir": 3}, "output_dir=3")],
)
def test_what_is_no_path_is_refused_before_it_is_opened(values: dict, said: str) -> None:
    def read_origin(init_from: str, run_dir: Path) -> Origin:
        raise AssertionError("opened")

    with pytest.raises(UsageError, match=said):
        build([values], read_origin)
