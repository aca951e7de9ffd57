"""Chats with a model: the text is what transformers writes greedily after the same template."""

from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import MeshShape
from jaxdist.inference.async_engine import AsyncEngine
from jaxdist.inference.device.runner_options import RunnerOptions
from jaxdist.inference.engine_options import EngineOptions
from jaxdist.inference.load import load_engine
from jaxdist.server.chat import Chat
from jaxdist.server.service import Model, ServerOptions
from jaxdist.server.token_text import TokenText
from jaxdist.training.model_source import open_model

from .conftest import CHATML

SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct.gguf"
CHATS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "And another?"},
    ],
)


def model_of(path: str | Path, **options: Any) -> Model:
    """The model at `path` in fp32, compiled as it goes."""
    source = open_model(path)
    engine = load_engine(
        source,
        mesh=MeshShape.parse("1x1x1"),
        runner_options=RunnerOptions(dtype="float32", max_num_seqs=1, **options),
        engine_options=EngineOptions(),
        warm=False,
    )
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    return Model(
        engine=AsyncEngine(engine),
        tokenizer=tokenizer,
        chat=Chat(tokenizer, source.companions()),
        text_of=TokenText(tokenizer),
    )


def answers(server, count: int) -> list[str]:
    body = {"temperature": 0, "max_tokens": count}
    return [
        server.post("/v1/chat/completions", body | {"messages": chat}).json()["choices"][0][
            "message"
        ]["content"]
        for chat in CHATS
    ]


def greedy(model, tokenizer, count: int) -> list[str]:
    """As transformers answers the same chats."""
    found = []
    for chat in CHATS:
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        whole = model.generate(**prompt, max_new_tokens=count, do_sample=False)
        new = whole[0, prompt["input_ids"].shape[1] :]
        found.append(tokenizer.decode(new, skip_special_tokens=True))
    return found


def test_a_hugging_face_folder_answers_as_transformers_does(serve, inner, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner(), eos_token="<|im_end|>", chat_template=CHATML
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.3,  # so that the likeliest token stands out
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=None,
        )
    )
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = {"num_blocks": 20, "max_row_tokens": 32}
    server = serve(ServerOptions(names=("tiny",)), model=model_of(tmp_path, **options))
    told = answers(server, 24)
    assert told == greedy(model, tokenizer, 24)
    assert len(set(told)) == len(CHATS) and min(map(len, told)) > 4


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_file(), reason="no SmolLM2 (bash scripts/fetch_model.sh)")
def test_smollm2_answers_as_transformers_does(serve):
    transformers = pytest.importorskip("transformers")
    named = {"gguf_file": SMOLLM2.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2.parent, **named)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        SMOLLM2.parent, dtype="float32", **named
    )
    options = {"num_blocks": 40, "max_model_len": 512, "max_row_tokens": 64}
    server = serve(ServerOptions(names=("smollm2",)), model=model_of(SMOLLM2, **options))
    told = answers(server, 24)
    assert told == greedy(model, tokenizer, 24)
    assert "Paris" in told[0]
