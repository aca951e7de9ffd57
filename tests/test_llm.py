"""`jaxdist.LLM`: what it writes is what naive generation writes, one prompt at a time."""

import asyncio

import numpy as np
import pytest

import jaxdist
from jaxdist import train
from jaxdist.config import UsageError
from jaxdist.inference.errors import RequestError
from jaxdist.inference.naive import Sampling
from jaxdist.inference.naive import generate as generate_ids
from jaxdist.llm import LLM
from jaxdist.models import Transformer
from jaxdist.training.model_source import open_model
from tests.small_run import small_model, write_run

PROMPTS = ["Zoë: ", "Once upon a time", "Once upon a time there", "x"]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return small_model()


@pytest.fixture(scope="module")
def llm(model, tmp_path_factory) -> LLM:
    folder = tmp_path_factory.mktemp("run")
    return LLM(
        write_run(folder, model, generation={"temperature": 0.0, "max_new_tokens": 7}),
        dtype="float32",
        block_size=4,
        num_blocks=40,
        max_num_seqs=4,
        max_row_tokens=32,
        max_model_len=64,
    )


def naive(model, prompt, count):
    return list(
        generate_ids(
            model, list(prompt.encode()), Sampling(max_tokens=count), eos_ids=(256,), vocab_size=257
        )
    )


def test_texts_are_those_of_naive_generation(model, llm):
    params = jaxdist.SamplingParams(temperature=0, max_tokens=12)
    outputs = llm.generate(PROMPTS, params)
    again = llm.generate(PROMPTS[::-1], [params] * 4)  # from the prefix cache
    for prompt, output, other in zip(PROMPTS, outputs, again[::-1], strict=True):
        want = naive(model, prompt, 12)
        got = list(output.outputs[0].token_ids)
        assert got[: len(want)] == want and got[len(want) :] in ([], [256])
        assert output.prompt == prompt and output.finished
        assert list(other.outputs[0].token_ids) == got
    assert again[2].num_cached_tokens == 12


def test_without_parameters_the_models_own_defaults_hold(model, llm):
    params = llm.get_default_sampling_params()
    assert params == jaxdist.SamplingParams(temperature=0.0, max_tokens=7)
    [output] = llm.generate("Zoë: ")
    assert list(output.outputs[0].token_ids) == naive(model, "Zoë: ", 7)
    [output] = llm.generate("x" * 60)  # as many as there is room for
    assert len(output.outputs[0].token_ids) <= 4
    with pytest.raises(UsageError, match="generation_config='mine' is not one of auto, none"):
        LLM("nowhere", generation_config="mine")


def test_one_prompt_may_be_a_text_ids_or_a_mapping(llm):
    params = jaxdist.SamplingParams(temperature=0, max_tokens=4)
    ids = list(b"abc")
    texts = [
        llm.generate(prompt, params)[0].outputs[0].text
        for prompt in ("abc", ids, [ids], {"prompt": "abc"}, [{"prompt_token_ids": ids}])
    ]
    assert len(set(texts)) == 1
    assert llm.generate([]) == []


def test_chats_go_through_the_template(llm):
    params = jaxdist.SamplingParams(temperature=0, max_tokens=4)
    messages = [{"role": "user", "content": "Hi"}]
    [output] = llm.chat(messages, params)
    assert bytes(output.prompt_token_ids) == b"User: Hi\n\nAssistant:"
    assert len(llm.chat([messages, messages], params)) == 2
    with pytest.raises(UsageError, match="messages: "):
        llm.chat([{"content": "Hi"}], params)
    with pytest.raises(UsageError, match="tools: function: "):
        llm.chat(messages, params, tools=[{"type": "function"}])
    tool = {"type": "function", "function": {"name": "rain"}}
    template = "{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools[0].type }}"
    [output] = llm.chat(
        messages, params, chat_template=template, tools=[tool], chat_template_kwargs={"mood": "!"}
    )
    assert bytes(output.prompt_token_ids) == b"!Hifunction"
    with pytest.raises(UsageError, match="must not set messages"):
        llm.chat(messages, params, chat_template_kwargs={"messages": []})


def test_a_cell_of_a_notebook_chats_while_its_event_loop_runs(llm):
    params = jaxdist.SamplingParams(temperature=0, max_tokens=4)
    messages = [{"role": "user", "content": "Hi"}]

    async def cell() -> str:
        [output] = llm.chat(messages, params)
        return output.outputs[0].text

    [output] = llm.chat(messages, params)
    assert asyncio.run(cell()) == output.outputs[0].text


def test_a_chat_without_a_template_ends_before_the_next_question(llm, monkeypatch):
    seen = []
    monkeypatch.setattr(llm, "generate", lambda prompts, params, **how: seen.append(params))
    own = jaxdist.SamplingParams(stop="end")
    for params in (None, own, [own, own]):
        llm.chat([{"role": "user", "content": "Hi"}], params)
    assert [p.stop for p in (seen[0], seen[1], *seen[2])] == [
        ("\n\nUser:",),
        *[("end", "\n\nUser:")] * 3,
    ]


def test_logprobs_say_which_text_they_are_of(llm):
    params = jaxdist.SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate("abc", params)
    assert output.prompt_logprobs[0] is None
    assert output.prompt_logprobs[2][ord("c")].decoded_token == "c"
    for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        assert len(entry) >= 2
        assert entry[token].decoded_token == llm.tokenizer.decode([token])


def test_a_bar_and_priorities(llm, capsys):
    params = jaxdist.SamplingParams(temperature=0, max_tokens=2)
    assert llm.generate(["a", "b"], params, use_tqdm=True, priority=[1, 0])
    assert "prompts" in capsys.readouterr().err
    assert llm.generate("a", params) and not capsys.readouterr().err
    with pytest.raises(UsageError, match="there are 1 prompts and 2 priorities"):
        llm.generate("a", params, priority=[1, 0])


def test_embeddings_are_vectors_of_their_prompts_alone(llm):
    both = llm.embed(["abc", "defgh"])
    [alone] = llm.embed("defgh")
    assert both[0].shape == (32,)
    np.testing.assert_allclose(both[1], alone, atol=1e-5)
    with pytest.raises(UsageError, match="pooling='max' is not one of mean, last"):
        llm.embed("abc", "max")


def test_what_cannot_be_done_is_refused_and_harms_nothing(llm):
    with pytest.raises(RequestError, match="max_tokens=100"):
        llm.generate(["abc", "abc"], jaxdist.SamplingParams(max_tokens=100))
    with pytest.raises(UsageError, match="there are 2 prompts and 1 sampling_params"):
        llm.generate(["a", "b"], [jaxdist.SamplingParams()])
    with pytest.raises(
        UsageError, match="LLM has no option max_num_seq; did you mean max_num_seqs"
    ):
        LLM("nowhere", max_num_seq=3)
    with pytest.raises(UsageError, match="LLM has no option tensor_parallel_size; give mesh 1x1xN"):
        LLM("nowhere", tensor_parallel_size=2)
    with pytest.raises(UsageError, match="is no model"):
        LLM("nowhere")
    assert not llm.engine.has_unfinished_requests()
    assert len(llm.generate("abc", jaxdist.SamplingParams(max_tokens=3))) == 1


@pytest.mark.slow
def test_a_training_run_is_served_from_its_folder(tmp_path):
    """Trained over stages and tp, served over another mesh: the text of the trained weights."""
    run = tmp_path / "run"
    words = [
        "--model.preset", "tiny", "--model.num_hidden_layers", "4", "--mesh", "1x2x2",
        "--parallel.schedule", "interleaved", "--parallel.num_chunks", "2",
        "--parallel.num_microbatches", "2", "--train.global_batch_size", "2",
        "--train.sequence_length", "32", "--train.steps", "3", "--precision.policy", "fp32",
        "--output-dir", str(run), "--log.progress", "false", "--log.tensorboard", "false",
        "--data.cache_dir", str(tmp_path / "cache"),
    ]  # fmt: skip
    assert train.main(words) == 0
    served = LLM(str(run), mesh="2x1x2", dtype="float32", num_blocks=20, max_model_len=48)
    prompts = [list(range(1, 40)), [5, 6]]
    outputs = served.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        jaxdist.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    )
    trained = open_model(str(run)).model()
    for prompt, output in zip(prompts, outputs, strict=True):
        size = served.tokenizer.vocab_size
        expected = generate_ids(trained, prompt, Sampling(max_tokens=6), vocab_size=size)
        assert list(output.outputs[0].token_ids) == list(expected)


def test_only_a_files_blocks_can_be_kept(model, tmp_path):
    """That their text is the dequantized model's is shown in weights/test_packed.py."""
    run = write_run(tmp_path, model)
    with pytest.raises(UsageError, match="--quantization keep: .* is a run, whose weights are not"):
        LLM(run, quantization="keep")
