"""Each family against transformers: logits, gradients, and a folder of ours that it loads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import UsageError
from jaxdist.interop.huggingface.folder import open_huggingface
from jaxdist.interop.huggingface.safetensors_file import open_safetensors
from jaxdist.interop.huggingface.write import write_huggingface
from jaxdist.interop.source import load_parameters
from jaxdist.models import Transformer
from jaxdist.models.moe import load_balancing_loss

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 16,
}
GEMMA = {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 5, "query_pre_attn_scalar": 9}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
DEEPSEEK = LATENT | EXPERTS | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
DEEPSEEK |= {"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_shared_experts": 2}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}


def case(model_type: str, name: str = "", *marks: pytest.MarkDecorator, **fields):
    return pytest.param(model_type, fields, id=f"{model_type}-{name}", marks=marks)


CASES = [
    case(
        "phi3",
        "longrope",
        pytest.mark.slow,
        rope_scaling=LONGROPE,
        original_max_position_embeddings=16,
    ),
    case("olmo2", "", pytest.mark.slow),
    case(
        "gemma2",
        "",
        pytest.mark.slow,
        **GEMMA,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    case(
        "gemma3_text",
        "",
        pytest.mark.slow,
        **GEMMA,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    case("gpt2", "", pytest.mark.slow, n_inner=48),
    case("mixtral", "", pytest.mark.slow, num_local_experts=5),
    case("qwen3_moe", **EXPERTS, num_experts=6, norm_topk_prob=True, head_dim=8),
    case("deepseek_v3", "", pytest.mark.slow, **DEEPSEEK),
    case("gpt2", "no_n_inner", pytest.mark.slow),
    case("phi3", "window", pytest.mark.slow, sliding_window=8),
    case("qwen3_moe", "unnormed", pytest.mark.slow, **EXPERTS, num_experts=6, head_dim=8),
    case("deepseek_v3", "yarn", pytest.mark.slow, **DEEPSEEK, rope_scaling=YARN),
    case("deepseek_v3", "no_q_lora", pytest.mark.slow, **DEEPSEEK | {"q_lora_rank": None}),
]
TOKENS, LABELS = np.random.default_rng(0).integers(0, 61, (2, 2, 24))
POSITIONS = np.broadcast_to(np.arange(24), TOKENS.shape)


def load(folder):
    source = open_huggingface(folder)
    make = lambda key: Transformer(source.config, key=key)  # noqa: E731
    return source, load_parameters(source, jax.eval_shape(make, jax.random.key(0)))


def their_model(folder):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def fields_of(model_type, fields):
    """With as many layer kinds as layers."""
    if "layer_types" in fields:
        fields = fields | {"layer_types": fields["layer_types"][: fields["num_hidden_layers"]]}
    # Of a padding token torch makes no gradient.
    return {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2} | fields


@pytest.mark.parametrize(("model_type", "fields"), CASES)
def test_equals_transformers_both_ways(model_type, fields, foreign, tmp_path):
    torch = pytest.importorskip("torch")
    folder = foreign(model_type, **fields_of(model_type, fields))
    theirs = their_model(folder)
    source, ours = load(folder)
    routed = source.config.num_experts > 0
    out = theirs(torch.tensor(TOKENS), **({"output_router_logits": True} if routed else {}))
    torch.nn.functional.cross_entropy(
        out.logits.flatten(0, 1), torch.tensor(LABELS.flatten()), reduction="sum"
    ).backward()

    def loss(model):
        logits, router = model.with_router(jnp.asarray(TOKENS), jnp.asarray(POSITIONS))
        log_probs = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(log_probs, LABELS[..., None], axis=-1)
        return -picked.sum(), (logits, router)

    gradients, (logits, router) = jax.jit(jax.grad(loss, has_aux=True))(ours)
    expected = out.logits.detach().numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
    if routed:
        shape = (-1, *TOKENS.shape, source.config.num_experts)
        their_router = torch.stack(out.router_logits).detach().numpy().reshape(shape)
        np.testing.assert_allclose(router, their_router, atol=1e-4, rtol=0)
    if getattr(out, "aux_loss", None) is not None:
        ours_aux = load_balancing_loss(source.config, router)
        np.testing.assert_allclose(ours_aux, out.aux_loss.item(), rtol=1e-5)

    with torch.no_grad():
        for weight in theirs.parameters():  # a folder of their gradients, read as weights are
            weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    _, expected_gradients = load(tmp_path / "gradients")
    for (path, g), e in zip(
        jax.tree_util.tree_leaves_with_path(gradients),
        jax.tree.leaves(expected_gradients),
        strict=True,
    ):
        if "correction_bias" not in jax.tree_util.keystr(path):  # a buffer, without a gradient
            scale = max(1.0, np.abs(e).max())
            np.testing.assert_allclose(g, e, atol=1e-4 * scale, rtol=0, err_msg=str(path))

    # The config it came with tells Phi-3 from Llama, whose arithmetic is the same.
    came_with = {"config.json": (folder / "config.json").read_bytes()}
    write_huggingface(tmp_path / "ours", source.config, source.weights(), companions=came_with)
    assert open_huggingface(tmp_path / "ours").config == source.config
    before, after = open_safetensors(folder), open_safetensors(tmp_path / "ours")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor)
    with torch.no_grad():
        again = their_model(tmp_path / "ours")(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(again, expected, atol=1e-6, rtol=0)


def test_gpt2_as_its_first_files_have_it(foreign, tmp_path):
    """Without the prefix of the whole model, and with masks that nothing reads."""
    folder = foreign("gpt2", **fields_of("gpt2", {"n_inner": 48}))
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = safetensors.load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 64, 64), np.float32)
    safetensors.save_file(bare, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path)[1], load(folder)[1])


def test_an_expert_that_is_missing_is_named(foreign, tmp_path):
    folder = foreign("mixtral", **fields_of("mixtral", {"num_local_experts": 5}))
    config = (folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('experts": 5', 'experts": 6'))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(UsageError, match=r"experts.5.w..weight' \(and 5 more\): missing"):
        load(tmp_path)
