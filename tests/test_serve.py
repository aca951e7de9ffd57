"""The door `serve`: what is wrong is one line, before anything is loaded."""

import re
from dataclasses import fields

import pytest

from jaxdist import serve
from jaxdist.config import UsageError
from jaxdist.config.options import parse_options
from jaxdist.inference import other_servers
from jaxdist.server.options import API_KEY, Options, check_words


def options(*words):
    return parse_options(Options, ("--model", "models/some-model.gguf", *words), "serve")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--model nowhere is no model"),
        (("--mesh", "2x2"), "mesh '2x2' has 2 degrees"),
        (("--mesh", "1x1x-1", "--simulate"), "with --simulate write the number"),
        (("--port", "99999"), "port=99999 must be"),
        (("--policy", "random"), "policy='random' is not one of fcfs, lpm"),
        (("--generation-config", "mine"), "generation-config='mine' is not one of auto, none"),
        (("--default-max-tokens", "0"), "default_max_tokens=0 must be at least 1"),
        (("--dtype", "float64"), "dtype='float64' is not one of"),
        (("--quantization", "drop"), "quantization='drop' is not one of keep"),
        (("--block-size", "0"), "block-size=0 must be at least 1"),
        (("--memory-fraction", "2"), "memory-fraction=2.0 must be"),
        (("--max-queued", "0"), "max-queued=0 must be at least 1"),
        (("--request-timeout", "0"), "request-timeout=0.0 must be greater than 0"),
        (("--api-key", ""), "must not be empty"),
        (("--chat-template", "nowhere.jinja"), "--chat-template nowhere.jinja"),
        (("--prot", "1"), "--prot is not an option; did you mean --port?"),
        (("--tensor-parallel-size=2",), "is not an option here; give --mesh 1x1xN"),
        (("-tp", "2"), "-tp is not an option here; give --mesh 1x1xN"),
        (("--gpu_memory_utilization", "0.9"), "give --memory-fraction, of the free memory"),
        (("--enable-prefix-caching",), "cached unless --no-prefix-caching is given; leave it out"),
        (("--speculative-config", "{}"), "give --speculative-tokens"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        serve.main(("--model", "nowhere", *words))
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_model_is_named_after_its_file():
    assert list(options().server().names) == ["some-model"]
    named = options("--served-model-name", "a", "--served-model-name", "b").server()
    assert list(named.names) == ["a", "b"]


def test_a_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(API_KEY, "hidden")
    assert options("--api-key", "open").server().api_keys == ("open", "hidden")


def test_options_reach_the_engine():
    given = options("--no-prefix-caching", "--speculative-tokens", "4", "--max-num-seqs", "8")
    assert not given.engine().enable_prefix_caching
    assert given.engine().num_speculative_tokens == given.runner().max_drafts == 4
    assert given.runner().max_num_seqs == 8
    assert options("--quantization", "keep").runner().quantization == "keep"
    assert options("--default-max-tokens", "99").engine().default_max_tokens == 99


def test_every_other_word_leads_to_one_of_ours():
    ours = {field.name for field in fields(Options)}
    names = [name for names in other_servers._HERE for name in names.split()]
    for name in names:
        assert name not in ours
        with pytest.raises(UsageError) as info:
            check_words((f"--{name}",))
        said = re.findall(r"--([a-z-]+)", str(info.value).partition("here; ")[2])
        assert all(word.replace("-", "_") in ours for word in said)
    with pytest.raises(UsageError, match="a model is --model some/folder"):
        check_words(("some/folder", "--port", "1"))
    with pytest.raises(UsageError, match="second is given without an option"):
        check_words(("--model", "m", "--api-key", "first", "second"))
    check_words(("--model", "m", "--log-text", "--api-key=first", "--port", "1"))
