"""Weights that stay in the blocks of their file: the engine's text is the dequantized model's."""

from pathlib import Path

import jax
import pytest

from jaxdist.config import MeshShape, UsageError
from jaxdist.inference.device.model_runner import ModelRunner
from jaxdist.inference.device.runner_options import RunnerOptions
from jaxdist.inference.engine import Engine
from jaxdist.inference.engine_options import EngineOptions
from jaxdist.inference.naive import Sampling, generate
from jaxdist.inference.weights import placement
from jaxdist.interop.gguf.file import open_gguf
from jaxdist.interop.gguf.packed import check_packed, load_packed_parameters
from jaxdist.interop.source import load_parameters
from jaxdist.models import Transformer
from jaxdist.quantization.gguf_blocks import PackedWeight
from jaxdist.quantization.packed_layers import MixedLayers
from jaxdist.training.model_source import open_model
from tests.inference.small_host import dense
from tests.inference.test_families import COUNT, PROMPTS, texts
from tests.interop.conftest import SmallModels
from tests.interop.gguf.test_packed import Mixed

slow = pytest.mark.slow
SMALL = SmallModels()
MIXED = ("q4_0", "q8_0", "f16")
SOME = PROMPTS[:1]  # few shapes to compile


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory):
    """file_of(model, *types): of several types its layers have them in turn."""
    folder = tmp_path_factory.mktemp("packed")

    def make(model: str, *types: str, **changes):
        files = []
        for gguf_type in types:
            path = folder / f"{model}-{gguf_type}-{len(changes)}.gguf"
            if not path.is_file():
                SMALL.write(path, model, gguf_type, **changes)
            files.append(open_gguf(path))
        return files[0] if len(files) == 1 else Mixed(*files)

    return make


def dequantized(file) -> Transformer:
    like = jax.eval_shape(lambda: Transformer(file.config, key=jax.random.key(0)))
    return load_parameters(file, like)


def runner_of(file, mesh: str) -> ModelRunner:
    return ModelRunner(
        file.config,
        lambda like: load_packed_parameters(file, like),
        mesh=MeshShape.parse(mesh),
        options=RunnerOptions(block_size=8, num_blocks=40, max_num_seqs=2, dtype="float32"),
    )


@pytest.mark.parametrize(
    ("model", "types", "meshes"),
    [
        ("llama", ("q4_0",), ("1x1x2",)),
        pytest.param("phi3", MIXED, ("1x1x1",), marks=slow),
        pytest.param("llama", ("q8_0",), ("1x2x1", "2x2x2"), marks=slow),
        pytest.param("deepseek2", ("q8_0",), ("1x1x2",), marks=slow),
        pytest.param("mixtral", MIXED, ("1x1x1",), marks=slow),
        pytest.param("gemma3", MIXED, ("1x1x2",), marks=slow),
        pytest.param("olmo2", MIXED, ("1x1x1",), marks=slow),
        pytest.param("gpt2", ("q4_0",), ("1x1x1",), marks=slow),
    ],
)
def test_text_is_the_dequantized_models(model, types, meshes, file_of):
    changes = {"num_hidden_layers": 5} if len(types) > 1 else {}
    file = file_of(model, *types, **changes)
    plain = dequantized(file)
    expected = [dense(plain, prompt, COUNT) for prompt in SOME]
    for mesh in meshes:
        runner = runner_of(file, mesh)
        block = runner._arrays[1][-1]
        weights = [block.self_attn.o_proj.weight]
        weights += [block.mlp.experts.down_proj] if file.config.num_experts else []
        for weight in weights:
            kind = MixedLayers if len(types) > 1 else PackedWeight
            assert isinstance(weight.get_value(), kind)
        engine = Engine(runner, None, EngineOptions(max_num_batched_tokens=19))
        assert texts(engine, SOME) == expected, mesh


@slow
def test_text_is_naive_generations(file_of):
    file = file_of("qwen3", *MIXED, num_hidden_layers=4)
    like = jax.eval_shape(lambda: Transformer(file.config, key=jax.random.key(0)))
    model = load_packed_parameters(file, like)
    expected = [list(generate(model, prompt, Sampling(max_tokens=COUNT))) for prompt in SOME]
    engine = Engine(runner_of(file, "1x1x1"), None, EngineOptions(max_num_batched_tokens=19))
    assert texts(engine, SOME) == expected


@slow
@pytest.mark.parametrize(("types", "mesh"), [(MIXED, "1x1x2"), (("q8_0",), "1x2x1")])
def test_gpus_have_a_stack_for_each_layer(types, mesh, file_of, monkeypatch):
    """Here on the CPU."""
    monkeypatch.setattr(placement, "platform_of", lambda mesh: "gpu")
    file = file_of("llama", *types, num_hidden_layers=4)
    runner = runner_of(file, mesh)
    stacks = runner._arrays[1]
    assert len(stacks) == 4 // MeshShape.parse(mesh).pp
    assert any(isinstance(s.mlp.up_proj.weight.get_value(), PackedWeight) for s in stacks)
    engine = Engine(runner, None, EngineOptions(max_num_batched_tokens=19))
    plain = dequantized(file)
    assert texts(engine, SOME) == [dense(plain, prompt, COUNT) for prompt in SOME]


def test_layers_stored_unlike_are_no_stages(tmp_path: Path):
    """Said from the head of the file; a file of one type is spread over stages."""
    path = tmp_path / "m.gguf"
    SMALL.write(path, "llama", "q8_0")
    open_model(path).check_packed(MeshShape.parse("1x2x1"))
    file = Mixed(open_gguf(path), open_gguf(path))
    file.packed_type = lambda name, layer: ("Q4_K", "Q6_K")[layer]
    file.header = file.files[0].header
    check_packed(file, MeshShape.parse("2x1x2"))
    with pytest.raises(UsageError, match=r"pp=2: the layers of .* \(.* as Q4_K, Q6_K\), so stages"):
        check_packed(file, MeshShape.parse("1x2x1"))
