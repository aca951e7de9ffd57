"""Whatever is sent, the answer is 200 or 4xx with a reason, and nothing is left behind."""

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxdist.server.protocol import ChatRequest, CompletionRequest, EmbeddingRequest

ODD = st.sampled_from(
    [None, "", [], {}, -1, 0, 1, 1e308, "x" * 5000, True, [[]], [None], {"a": {"b": []}}, 2**63]
    + [-0.5, "\0", [-1], [10**9], "NaN", ["a"] * 300, {"type": "json_object"}, "auto", [1, 2]]
    + [{"type": "json_schema", "json_schema": {"name": "p", "schema": {"type": "no"}}}]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
PATHS = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "a"}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "a"}),
}


@st.composite
def requests(draw):
    path = draw(st.sampled_from(sorted(PATHS)))
    kind, body = PATHS[path]
    names = sorted(field.alias or name for name, field in kind.model_fields.items())
    changed = draw(st.dictionaries(st.sampled_from(names), ODD | JSON, min_size=1, max_size=3))
    return path, {"max_tokens": 1} | body | changed


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(request=requests())
def test_only_refusals_with_a_reason(server, request):
    path, body = request
    raw = json.dumps(body).encode()
    answer = server.client.post(path, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"] and "Traceback" not in answer.text
        assert "x" * 100 not in answer.text
    server.settle()
    server.service.model.engine.engine.check_integrity()


@settings(max_examples=30, deadline=None)
@given(raw=st.binary(max_size=60))
def test_any_bytes(server, raw):
    assert server.client.post("/v1/completions", content=raw).status_code == 400


def test_deep_arguments_of_a_call_of_the_past_are_text(server):
    for depth in (100, 500, 900, 5000):
        call = {"name": "f", "arguments": "[" * depth + "]" * depth}
        past = {"role": "assistant", "tool_calls": [{"id": "a", "function": call}]}
        body = {"messages": [past, {"role": "user", "content": "a"}], "max_tokens": 1}
        assert server.post("/v1/chat/completions", body).status_code == 200
