"""Naive generation equals the full forward at each step, with every attention and rope variant."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import UsageError
from jaxdist.inference.naive import Sampling, check_prompt, generate, sample
from jaxdist.models import Transformer

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 16,
}


def reference(model: Transformer, prompt: list[int], sampling: Sampling) -> list[int]:
    """The whole text through the plain forward, again for each token."""
    forward = jax.jit(Transformer.__call__)
    text = list(prompt)
    for _ in range(sampling.max_tokens):
        logits = forward(model, jnp.array([text]), jnp.arange(len(text))[None])[0, -1]
        key = jax.random.fold_in(jax.random.key(sampling.seed), len(text))
        text.append(int(sample(logits, sampling.temperature, key)))
    return text[len(prompt) :]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"sliding_window": 4, "qk_norm": True}, id="window"),
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param({"rope_scaling": LONGROPE}, id="longrope", marks=pytest.mark.slow),
        pytest.param(
            {
                "max_position_embeddings": 16,
                "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
            },
            id="dynamic",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.5, marks=pytest.mark.slow)])
def test_every_token_is_the_full_forwards(fields, temperature, model_of):
    model = model_of(**fields)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]  # the scalings switch at 17 tokens
    sampling = Sampling(max_tokens=4, temperature=temperature, seed=7)
    assert list(generate(model, prompt, sampling)) == reference(model, prompt, sampling)


def test_the_end_token_ends_the_text_and_is_not_given(model_of):
    model, prompt = model_of(), [3, 1, 4, 1, 5]
    free = list(generate(model, prompt, Sampling(max_tokens=8)))
    stopped = list(generate(model, prompt, Sampling(max_tokens=8), eos_ids=(free[4],)))
    assert stopped == free[: free.index(free[4])]


def test_ids_beyond_the_tokenizers_vocabulary_are_not_given(model_of):
    model, sampling = model_of(), Sampling(max_tokens=8, temperature=5.0)
    assert max(generate(model, [3, 1, 4, 1, 5], sampling)) >= 10
    assert max(generate(model, [3, 1, 4, 1, 5], sampling, vocab_size=10)) < 10


def test_samples_follow_the_probabilities():
    logits = jnp.log(jnp.array([0.5, 0.0, 0.3, 0.2]))
    keys = jax.random.split(jax.random.key(0), 20_000)
    drawn = jax.vmap(lambda key: sample(logits, 1.0, key))(keys)
    share = np.bincount(drawn, minlength=4) / keys.size
    np.testing.assert_allclose(share, [0.5, 0.0, 0.3, 0.2], atol=0.015)
    cold = jax.vmap(lambda key: sample(logits, 1e-30, key))(keys[:50])
    assert not np.asarray(cold).any()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "the prompt has no tokens; give at least one"),
        ([61], 1, "ids reach from 61 to 61; the model's vocabulary has 0 to 60"),
        ([5, -1], 1, "ids reach from -1 to 5"),
        ([0] * 32, 1, "the prompt has 32 tokens and the model's context 32; shorten it to"),
        ([0] * 30, 3, "set max-tokens to at most 2"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused(prompt, max_tokens, message, model_of):
    config = model_of().config
    with pytest.raises(UsageError, match=message):
        check_prompt(config, prompt, max_tokens)
    with pytest.raises(UsageError, match=message):
        next(generate(model_of(), prompt, Sampling(max_tokens=max_tokens)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max-tokens=0 must be at least 1"),
        ({"max_tokens": 1, "temperature": -0.1}, "temperature=-0.1 must be at least 0"),
        ({"max_tokens": 1, "temperature": float("inf")}, "temperature=inf must be a finite"),
        ({"max_tokens": 1, "seed": 2**32}, "seed=4294967296 must be"),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        Sampling(**fields)
