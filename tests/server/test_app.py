"""The routes over a runner without a device: OpenAI's shapes, streamed as whole, and usage."""

import base64
import json
from dataclasses import replace

import numpy as np
import pytest

from jaxdist import __version__
from jaxdist.inference.guidance import grammar

PARTS = [{"type": "text", "text": "a"}]
USER = [{"role": "user", "content": "hi"}]
CHAT = {"messages": USER, "max_tokens": 12, "seed": 5}
CHATS = "/v1/chat/completions"
WRONG = {"type": "json_schema", "json_schema": {"name": "p", "schema": {"type": "no"}}}
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}


def chunks(server, path, body):
    events = server.events(path, body)
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_a_chat_is_answered(server):
    answer = server.post("/v1/chat/completions", CHAT).json()
    assert answer["object"] == "chat.completion" and answer["model"] == "small"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["refusal"] is None
    assert choice["finish_reason"] in ("stop", "length") and choice["logprobs"] is None
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_the_whole_answer_in_pieces(server, n):
    body = CHAT | {"n": n, "logprobs": True, "top_logprobs": 2}
    whole = server.post("/v1/chat/completions", body).json()
    told = chunks(
        server, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}}
    )
    assert told[-1]["usage"] == whole["usage"] and told[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in told[:-1])
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in told[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(piece["delta"].get("content", "") for piece in mine)
        assert text == choice["message"]["content"]
        reasons = [p["finish_reason"] for p in mine if p["finish_reason"]]
        assert reasons == [choice["finish_reason"]]
        logged = [e for p in mine if p["logprobs"] for e in p["logprobs"]["content"]]
        assert logged == choice["logprobs"]["content"]


@pytest.mark.parametrize("length", [1, 3])
def test_no_part_of_a_stop_text_is_streamed(server, length):
    body = CHAT | {"max_tokens": 40, "ignore_eos": True}
    free = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    stop = free[20 : 20 + length]
    body |= {"stop": [stop, "zz"]}
    (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
    assert choice["message"]["content"] == free.split(stop)[0]
    pieces = [chunk["choices"][0] for chunk in chunks(server, "/v1/chat/completions", body)]
    assert "".join(p["delta"].get("content", "") for p in pieces) == free.split(stop)[0]
    assert pieces[-1]["finish_reason"] == choice["finish_reason"] == "stop"


def test_the_models_own_sampling_holds_where_a_request_says_nothing(server, monkeypatch):
    model = server.service.model
    monkeypatch.setattr(server.service, "model", replace(model, defaults={"temperature": 0.0}))

    def texts(path, body):
        return [server.post(path, body | {"seed": seed}).json()["choices"][0] for seed in (1, 2)]

    (about, _) = server.client.get("/v1/models").json()["data"]
    assert about["default_sampling_params"] == {"temperature": 0.0}
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hi"})):
        one, other = texts(path, body)
        assert one == other
        one, other = texts(path, body | {"temperature": 1})
        assert one != other


@pytest.mark.parametrize("path", [CHATS, "/v1/completions"])
def test_the_usage_may_come_with_every_event(server, path):
    body = CHAT | {"prompt": "hi", "ignore_eos": True, "max_tokens": 700}
    asked = {"include_usage": True, "continuous_usage_stats": True}
    told = chunks(server, path, body | {"stream_options": asked})
    counts = [chunk["usage"]["completion_tokens"] for chunk in told]
    assert counts == sorted(counts) and counts[0] < counts[-1] == 700
    assert told[-1]["choices"] == [] and told[-2]["usage"] == told[-1]["usage"]
    alone = chunks(server, path, body | {"stream_options": {"continuous_usage_stats": True}})
    assert alone[-1]["usage"] == told[-1]["usage"]
    never = chunks(server, path, body | {"stream_options": asked | {"include_usage": False}})
    assert not any("usage" in chunk for chunk in never)


def test_ids_of_the_tokens_are_told_where_asked_for(server, tokenizer):
    body = CHAT | {"n": 2, "return_token_ids": True, "ignore_eos": True}
    whole = server.post(CHATS, body).json()
    told = chunks(server, CHATS, body)
    prompt = server.post("/tokenize", {"messages": USER}).json()["tokens"]
    assert whole["prompt_token_ids"] == prompt == told[0]["prompt_token_ids"]
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in told if c["choices"][0]["index"] == choice["index"]]
        assert [i for piece in mine for i in piece.get("token_ids", ())] == choice["token_ids"]
        assert len(choice["token_ids"]) == 12
    assert "prompt_token_ids" not in server.post(CHATS, CHAT).json()

    body = {"prompt": ["a", "bc"], "max_tokens": 7, "seed": 1, "return_token_ids": True}
    whole = server.post("/v1/completions", body).json()["choices"]
    told = [chunk["choices"][0] for chunk in chunks(server, "/v1/completions", body)]
    for choice, text in zip(whole, ["a", "bc"], strict=True):
        mine = [piece for piece in told if piece["index"] == choice["index"]]
        assert choice["prompt_token_ids"] == tokenizer.encode(text) == mine[0]["prompt_token_ids"]
        assert [i for piece in mine for i in piece["token_ids"]] == choice["token_ids"]
        assert not any("prompt_token_ids" in piece for piece in mine[1:])


def test_tokens_may_be_named_by_their_ids(server):
    named = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    body = CHAT | named | {"logprobs": True, "top_logprobs": 2}
    (choice,) = server.post(CHATS, body).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert [e["token"] for e in entries] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert all(t["token"].startswith("token_id:") for e in entries for t in e["top_logprobs"])
    body = named | {"prompt": "a", "logprobs": 2}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    names = [f"token_id:{i}" for i in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert all(
        name.startswith("token_id:") for t in choice["logprobs"]["top_logprobs"] for name in t
    )


@pytest.mark.parametrize("count", [0, 2])
def test_a_completions_token_is_always_among_its_candidates(server, count):
    body = {"prompt": "abc", "echo": True, "logprobs": count, "ignore_eos": True}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    told = choice["logprobs"]
    entries = list(
        zip(*(told[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
    )
    assert len(entries) == 3 + 16
    for token, logprob, top in entries[1:]:
        assert top[token] == logprob and count <= len(top) <= count + 1 or not count


def test_prompts_are_cut_to_their_last_tokens(server, tokenizer):
    def asked(path, **body):
        answer = server.post(path, body | {"return_token_ids": True})
        assert answer.status_code == 200, answer.text
        return answer.json()

    letters = "abcdefgh"
    told = asked("/v1/completions", prompt=letters, truncate_prompt_tokens=3, echo=True)
    assert told["choices"][0]["prompt_token_ids"] == tokenizer.encode("fgh")
    assert told["choices"][0]["text"].startswith("fgh") and told["usage"]["prompt_tokens"] == 3
    told = asked("/v1/completions", prompt=letters, truncate_prompt_tokens=8)
    assert told["choices"][0]["prompt_token_ids"] == tokenizer.encode(letters)
    long = "x" * 1500  # 1024 fit
    told = asked("/v1/completions", prompt=long, truncate_prompt_tokens=-1, max_tokens=20)
    assert told["usage"]["prompt_tokens"] == 1004
    chat = [{"role": "user", "content": long}]
    told = asked(CHATS, messages=chat, truncate_prompt_tokens=-1, max_tokens=9)
    assert told["usage"]["prompt_tokens"] == 1015
    told = asked("/v1/embeddings", input=[long, "a"], truncate_prompt_tokens=-1)
    assert told["usage"]["prompt_tokens"] == 1025
    told = asked("/v1/embeddings", input=letters, truncate_prompt_tokens=2)
    assert told["data"] == asked("/v1/embeddings", input="gh")["data"]


def test_one_call_where_several_are_not_wanted(server):
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    text = "\n".join(("Yes." + call, call.replace("1", "2")))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = CHAT | {"tools": [tool], "max_tokens": 400, "structured_outputs": {"choice": [text]}}
    for several, count in ((True, 2), (False, 1)):
        asked = body | {"parallel_tool_calls": several}
        (choice,) = server.post(CHATS, asked).json()["choices"]
        arguments = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
        assert arguments == ['{"a": 1}', '{"a": 2}'][:count]
        assert choice["message"]["content"] == "Yes." and choice["finish_reason"] == "tool_calls"
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks(server, CHATS, asked)]
        streamed = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert {call["index"] for call in streamed} == {*range(count)}
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes."


def test_usage_counts_a_prompt_once(server):
    one = server.post("/v1/chat/completions", CHAT).json()["usage"]
    three = server.post("/v1/chat/completions", CHAT | {"n": 3}).json()["usage"]
    assert three["prompt_tokens"] == one["prompt_tokens"]


def test_completions_of_several_prompts(server):
    prompts = ["ab", "cd", "ef" * 40]  # the last one is computed in chunks
    body = {"prompt": prompts, "n": 2, "max_tokens": 5, "seed": 1, "logprobs": 1}
    whole = server.post("/v1/completions", body).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert whole["usage"]["prompt_tokens"] == 84
    *told, last = chunks(
        server, "/v1/completions", body | {"stream_options": {"include_usage": True}}
    )
    assert last["usage"] == whole["usage"] and last["choices"] == []
    assert all(chunk["usage"] is None for chunk in told)
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in told if c["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert [x for p in mine for x in p["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]
        offsets = [x for p in mine for x in p["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_gives_the_prompt_with_its_logprobs(server, max_tokens):
    body = {
        "prompt": "abc",
        "echo": True,
        "logprobs": 1,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    answer = server.post("/v1/completions", body).json()
    (choice,) = answer["choices"]
    assert choice["text"].startswith("abc") and len(choice["text"]) <= 3 + max_tokens
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:3] == ["a", "b", "c"]
    assert len(logprobs["tokens"]) == 3 + max_tokens
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"
    body |= {"ignore_eos": False, "logprobs": None}  # whatever the one token is, it is not told
    for seed in range(20 if not max_tokens else 0):
        (choice,) = server.post("/v1/completions", body | {"seed": seed}).json()["choices"]
        ended = (choice["text"], choice["finish_reason"], choice["stop_reason"])
        assert ended == ("abc", "length", None)


def test_a_named_tool_is_called(server):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = CHAT | {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["function"]["name"] == "f"
    assert choice["message"]["content"] is None
    told = chunks(server, "/v1/chat/completions", body)
    calls = [c for t in told for c in t["choices"][0]["delta"].get("tool_calls", ())]
    assert calls[0]["id"].startswith("call_") and {c["index"] for c in calls} == {0}
    streamed = "".join(c["function"]["arguments"] for c in calls)
    assert streamed == call["function"]["arguments"]


def test_embeddings_have_length_one(server):
    body = {"input": ["ab", "cd"], "pooling": "last"}
    answer = server.post("/v1/embeddings", body).json()
    vectors = [np.array(item["embedding"]) for item in answer["data"]]
    np.testing.assert_allclose([np.linalg.norm(v) for v in vectors], 1, rtol=1e-5)
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4}
    packed = server.post("/v1/embeddings", body | {"encoding_format": "base64"}).json()
    raw = base64.b64decode(packed["data"][1]["embedding"])
    np.testing.assert_allclose(np.frombuffer(raw, "<f4"), vectors[1], rtol=1e-6)
    assert server.post("/v1/embeddings", body | {"dimensions": 8}).status_code == 200
    num_steps = server.service.model.engine.engine.runner.num_steps
    refused = server.post("/v1/embeddings", body | {"dimensions": 5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")
    assert server.service.model.engine.engine.runner.num_steps == num_steps


def test_text_becomes_ids_and_back(server, tokenizer):
    told = server.post("/tokenize", {"prompt": "ab<s>", "return_token_strs": True}).json()
    assert told["tokens"] == tokenizer.encode("ab<s>") and told["count"] == len(told["tokens"])
    assert "".join(told["token_strs"]) == "ab<s>" and told["max_model_len"] == 1024
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "ab<s>"}
    chat = server.post("/tokenize", {"messages": USER}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": chat}).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    begun = [*USER, {"role": "assistant", "content": "Well"}]
    body = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    chat = server.post("/tokenize", body).json()["tokens"]
    text = server.post("/detokenize", {"tokens": chat}).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\nWell")


def test_special_tokens_are_read_in_prompts_where_asked_for(server, tokenizer, monkeypatch):
    text = "<|im_start|>hi<|im_end|>"
    plain = tokenizer.encode(text)
    special = [tokenizer._inner.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>")]
    read = [special[0], *tokenizer.encode("hi"), special[1]]

    def prompts(**fields):
        ids = server.post("/tokenize", {"prompt": text} | fields).json()["tokens"]
        body = {"prompt": text, "max_tokens": 1, "return_token_ids": True} | fields
        (choice,) = server.post("/v1/completions", body).json()["choices"]
        assert choice["prompt_token_ids"] == ids
        return ids

    assert prompts() == prompts(parse_special=False) == plain
    assert prompts(parse_special=True) == read
    told = replace(server.service.options, parse_special=True)
    monkeypatch.setattr(server.service, "options", told)
    assert prompts() == read and prompts(parse_special=False) == plain
    chat = {"messages": [{"role": "user", "content": text}]}
    ids = server.post("/tokenize", chat | {"parse_special": True}).json()["tokens"]
    assert sum(i in special for i in ids) == 3  # the template's own
    # A beginning that is spelled is not written a second time.
    monkeypatch.setattr(tokenizer, "bos_id", special[0])
    assert prompts(parse_special=True) == read and prompts(parse_special=False)[1:] == plain


def test_models_have_names(server):
    names = [model["id"] for model in server.client.get("/v1/models").json()["data"]]
    assert names == ["small", "alias"]
    assert server.client.get("/v1/models/alias").json()["id"] == "alias"
    missing = server.client.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    assert server.post("/v1/chat/completions", CHAT | {"model": "other"}).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {"prompt": "a" * 1100}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1100}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"prompt": []}, 400, "prompt"),
        ("/v1/completions", {"prompt": [9999]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"4294967296": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "stop": ["x"] * 99}, 400, "stop"),
        ("/v1/completions", {"prompt": "a", "stop": "x" * 9999}, 400, "stop"),
        ("/v1/completions", {"prompt": ["a"] * 999}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "n": 999}, 400, "n"),
        ("/v1/completions", {"prompt": "a", "n": int("9" * 4000)}, 400, "n"),
        ("/v1/completions", {"prompt": "a", "guided_json": "false"}, 400, "guided_json"),
        (CHATS, {"messages": USER * 9000}, 400, "messages"),
        ("/v1/completions", {"prompt": [1] * (2**20 + 1)}, 400, "prompt"),
        ("/v1/completions", {"prompt": [[1] * 2**18] * 4}, 400, "prompt"),
        ("/v1/embeddings", {"input": [1] * (2**20 + 1)}, 400, "input"),
        ("/detokenize", {"tokens": [1] * (2**20 + 1)}, 400, "tokens"),
        (CHATS, {"messages": [USER[0] | {"content": PARTS * 9000}]}, 400, "messages"),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": []}, 400, "allowed_token_ids"),
        ("/v1/completions", {"prompt": "a", "bad_words": [""]}, 400, "bad_words"),
        ("/v1/completions", {"prompt": "a", "guided_regex": "(a"}, 400, "guided_regex"),
        (CHATS, {"messages": USER, "response_format": WRONG}, 400, "response_format"),
        (CHATS, {"messages": USER, "tools": [BAD_TOOL], "tool_choice": "required"}, 400, "tools"),
        (CHATS, {"messages": [USER[0] | {"content": "a" * 1100}]}, 400, "messages"),
        (CHATS, {"messages": USER, "max_completion_tokens": 1100}, 400, "max_completion_tokens"),
        (CHATS, {"messages": USER, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
        (CHATS, {"messages": USER, "documents": [{"text": "a"}]}, 400, "documents"),
        ("/v1/embeddings", {"input": "a" * 1100}, 400, "input"),
        ("/v1/embeddings", {"input": ""}, 400, "input"),
        ("/detokenize", {"tokens": [9999]}, 400, "tokens"),
        ("/v1/nothing", {}, 404, None),
        ("/health", {}, 405, None),
    ],
)
def test_what_cannot_be_is_refused(server, path, body, status, param):
    answer = server.post(path, body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["param"] == param and 0 < len(error["message"]) < 500


@pytest.mark.parametrize(
    "method, path, status, allow",
    [
        ("GET", "/v1/completions", 405, "POST"),
        ("POST", "/health", 405, "GET"),
        ("PUT", "/", 405, "GET, HEAD"),
        ("DELETE", "/index.html", 405, "GET, HEAD"),
        ("PUT", "/nothing", 404, None),
        ("PUT", "/" + "a" * 5000, 404, None),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(server, method, path, status, allow):
    answer = server.client.request(method, path)
    assert (answer.status_code, answer.headers.get("allow")) == (status, allow)


def test_a_structure_that_found_no_time_may_be_sent_again(server, monkeypatch):
    def busy(*given):
        raise grammar.Busy("other structures are being tried")

    with monkeypatch.context() as patched:
        patched.setattr(grammar, "compile", busy)
        answer = server.post("/v1/completions", {"prompt": "a", "guided_regex": "a"})
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    message = answer.json()["error"]["message"]
    assert message == "other structures are being tried; try again later"


def test_a_prompt_that_is_too_long_says_both_numbers(server):
    error = server.post("/v1/completions", {"prompt": "a" * 1100}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "1100" in error["message"] and "1024" in error["message"]


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"[]", b'{"prompt": NaN}', b'{"prompt": "\\ud83d"}'],
)
def test_bodies_that_are_no_json_are_refused(server, raw):
    answer = server.client.post("/v1/completions", content=raw)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_metrics_have_vllms_names(server):
    answer = server.post("/v1/chat/completions", CHAT)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 1
    server.settle()
    text = server.client.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    labels = '{engine="0",model_name="small"}'
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert float(values[f"vllm:{name}{labels}"]) == 0
    for name in ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total",
                 "time_to_first_token_seconds_count", "e2e_request_latency_seconds_count",
                 "inter_token_latency_seconds_count"):  # fmt: skip
        assert float(values[f"vllm:{name}{labels}"]) > 0, name
    for name in ("request_inference_time_seconds", "request_prefill_time_seconds",
                 "request_decode_time_seconds", "request_max_num_generation_tokens",
                 "request_params_max_tokens", "request_params_n"):  # fmt: skip
        assert float(values[f"vllm:{name}_count{labels}"]) > 0, name
    assert f"vllm:spec_decode_num_drafts_total{labels}" in values
    about = '{block_size="4",engine="0",model_name="small",num_gpu_blocks="599"}'
    assert f"vllm:cache_config_info{about}" in values
    assert f"jaxdist:compilations_total{labels}" in values
    assert f"jaxdist:padding_ratio{labels}" in values


def test_the_engine_is_shown(server):
    server.settle()
    view = server.client.get("/engine").json()
    assert view["state"] == "ready" and view["num_running"] == 0
    (replica,) = view["replicas"]
    assert sum(count for _, count in replica["blocks"]) == replica["num_blocks"]
    with server.client.stream("GET", "/engine?stream=true") as answer:
        line = next(answer.iter_lines())
    assert json.loads(line.removeprefix("data: "))["state"] == "ready"


def test_a_wrong_address_is_refused(server):
    answer = server.client.get("/engine?stream=perhaps")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "stream"


def test_the_server_tells_how_it_is(server):
    for path in ("/health", "/ready"):
        assert server.client.get(path).status_code == 200
    assert server.client.get("/docs").status_code == 200
    assert server.client.get("/version").json() == {"version": __version__}
    schema = server.client.get("/openapi.json").json()
    assert "ChatRequest" in schema["components"]["schemas"]
    page = server.client.get("/")
    assert (
        page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]
    )
