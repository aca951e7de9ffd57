"""Every family through the engine: its greedy text is naive generation's and the training model's,
whatever the chunks; in 16 bits its logits are those of the training model in 16 bits."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.inference.engine import Engine
from jaxdist.inference.engine_options import EngineOptions
from jaxdist.inference.naive import Sampling, generate
from jaxdist.inference.sampling.sampling_params import SamplingParams
from jaxdist.models import default_context
from tests.inference.small_host import Host, dense, runner_of

pytestmark = pytest.mark.slow

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GEMMA = {
    "norm": "rmsnorm1p",
    "norm_order": "sandwich",
    "mlp": "geglu",
    "scale_embeddings": True,
    "tie_word_embeddings": True,
    "sliding_window": 5,
    "query_pre_attn_scalar": 9,
    "head_dim": 16,
}
FAMILIES = {
    "gemma2": GEMMA
    | {
        "num_hidden_layers": 4,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": GEMMA
    | {
        "num_hidden_layers": 4,
        "sliding_window_pattern": 3,
        "qk_norm": True,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "gpt2": {
        "norm": "layernorm",
        "mlp": "gelu",
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "position_embedding": "learned",
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "phi3": {"sliding_window": 6},
    "olmo2": {"norm_order": "post", "qk_norm": True, "qk_norm_width": "all"},
    "mixtral": {"num_experts": 5, "sliding_window": 6},
    "qwen3_moe": EXPERTS | {"qk_norm": True, "norm_topk_prob": False},
    "deepseek_v3": EXPERTS
    | {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "scoring_func": "sigmoid",
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "n_shared_experts": 2,
        "num_key_value_heads": 4,
        "kv_lora_rank": 10,
        "q_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
    },
}
# Shared experts wide enough that the CPU keeps them in blocks.
FAMILIES["shared_in_blocks"] = EXPERTS | {"moe_intermediate_size": 64, "n_shared_experts": 2}
PROMPTS = ([3, 1, 4, 1, 5], list(range(1, 42)), [7, 7])
COUNT = 6


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_naive_generations(family, model_of):
    model = model_of(max_position_embeddings=64, **FAMILIES[family])
    expected = [dense(model, prompt, COUNT) for prompt in PROMPTS]
    assert list(generate(model, PROMPTS[0], Sampling(max_tokens=COUNT))) == expected[0]
    for mesh in ("1x1x1", "2x1x1" if family in ("gpt2", "mixtral") else "1x1x2"):
        # Few shapes: tables of one width, and two rows to decode.
        runner = runner_of(model, mesh, block_size=8, max_num_seqs=2)
        engine = Engine(runner, None, EngineOptions(max_num_batched_tokens=19))
        assert texts(engine) == expected, mesh
    if not model.config.num_experts:  # a rounded router chooses other experts, in any program
        check_16_bits(model)


def texts(engine: Engine, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add(engine.prepare(str(number), prompt, params=params, stream=False))
    found: dict[str, list[int]] = {}
    while len(found) < len(prompts):
        for out in engine.step():
            found[out.request_id] = list(out.outputs[0].token_ids)
    return [found[str(number)] for number in range(len(prompts))]


def check_16_bits(model) -> None:
    """A prompt's log-probabilities, of the paged program and of the plain one, both in bf16."""
    prompt = PROMPTS[1]
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model)
    ctx = default_context(model.config, compute_dtype=jnp.bfloat16)
    tokens, positions = jnp.array([prompt]), jnp.arange(len(prompt))[None]
    logits = jax.jit(lambda m: m(tokens, positions, ctx=ctx))(half)
    exact = jax.jit(lambda m: m(tokens, positions))(half)
    rounding = float(jnp.abs(logits - exact).max())
    runner = runner_of(model, dtype="bfloat16", block_size=8)
    host = Host(runner, np.random.default_rng(0))
    host.start(0, prompt, SamplingParams(temperature=0.0, seed=0, prompt_logprobs=1))
    (result,) = host.step(host.row(0, prompt, 0))
    log_probs = np.asarray(jax.nn.log_softmax(logits[0]))
    wanted = log_probs[np.arange(len(prompt) - 1), prompt[1:]]
    found = [entry.chosen for entry in result.prompt_logprobs]
    # Two programs in bf16 are as far from each other as one of them from the exact one, or twice.
    np.testing.assert_allclose(found, wanted, atol=2 * rounding)
