"""Who may come in: keys, origins, bodies, queues, and a server that is about to stop."""

import json
import logging
import socket
import threading
import time
from contextlib import ExitStack

import httpx
import pytest

from jaxdist.server import connection
from jaxdist.server.limits import Limits
from jaxdist.server.service import ServerOptions

PATH = "/v1/completions"
BODY = {"prompt": "a", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def locked(serve):
    return serve(
        ServerOptions(
            names=("locked",),
            api_keys=("first-key", "second-key"),
            cors_origins=("https://friend.example",),
            limits=Limits(max_body_bytes=2000, max_queued=2, max_concurrent=8),
            prompt_details=True,
        ),
        max_num_seqs=1,
        max_model_len=4096,
        num_blocks=1100,
        delay=lambda: time.sleep(0.002),
    )


def key(name="first-key"):
    return {"authorization": f"Bearer {name}"}


@pytest.mark.parametrize(
    "headers", [{}, key("wrong"), {"authorization": "first-key"}, key("fïrst-key")]
)
def test_without_a_key_nothing_is_served(locked, headers):
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    for path in (PATH, "/v1/chat/completions", "/tokenize"):
        answer = locked.post(path, BODY, headers=raw)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert locked.client.get("/v1/models", headers=raw).status_code == 401
    assert locked.client.get("/engine", headers=raw).status_code == 401
    assert locked.client.get("/health", headers=raw).status_code == 200


def test_each_key_serves(locked):
    for name in ("first-key", "second-key"):
        assert locked.post(PATH, BODY, headers=key(name)).status_code == 200


def test_cached_prompts_are_of_one_key(locked):
    def cached(name, **fields):
        body = BODY | {"prompt": "the same long prompt for everybody"} | fields
        usage = locked.post(PATH, body, headers=key(name)).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached("first-key") == 0
    assert cached("first-key") > 0
    assert cached("second-key") == 0
    assert cached("first-key", cache_salt="mine") == 0


def test_a_large_body_is_refused(locked):
    body = BODY | {"prompt": "a" * 3000}
    answer = locked.post(PATH, body, headers=key())
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    chunks = (json.dumps(body)[i : i + 500].encode() for i in range(0, 4000, 500))
    answer = locked.client.post(PATH, content=chunks, headers=key())
    assert answer.status_code == 413


def test_pages_from_elsewhere_are_refused(locked):
    def status(origin):
        return locked.post(PATH, BODY, headers=key() | {"origin": origin}).status_code

    assert status("https://evil.example") == 403
    assert status("https://friend.example") == 200
    assert status(locked.url) == 200
    answer = locked.client.options(
        PATH,
        headers={
            "origin": "https://friend.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        },
    )
    assert answer.status_code == 200
    assert "x-stainless-lang" in answer.headers["access-control-allow-headers"]
    assert answer.headers["access-control-allow-origin"] == "https://friend.example"


@pytest.mark.parametrize(
    "host, status",
    [
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("localhost:8000", 200),
        ("rebound.evil.example", 403),  # a name of theirs that leads to this machine
        ("1.2.3.4.evil.example", 403),
        ("[::1", 403),  # no address at all
    ],
)
def test_a_page_whose_name_was_made_to_lead_here_is_refused(server, host, status):
    answer = server.post(PATH, BODY, headers={"host": host, "origin": f"http://{host}"})
    assert answer.status_code == status


def test_a_body_with_two_lengths_is_refused_and_its_connection_closed(server):
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n".encode())
        said = b"".join(iter(lambda: client.recv(4096), b""))  # till the server closes
    assert said.startswith(b"HTTP/1.1 400") and said.count(b"HTTP/1.1") == 1
    assert b"exclude each other" in said


@pytest.mark.parametrize("begin", [b"", b"POST / HTTP/1.1\r\nHost: x\r\n"])
def test_who_says_nothing_is_not_waited_for(server, monkeypatch, begin):
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.5)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(begin)
        assert client.recv(1) == b""
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(whole)
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        client.sendall(whole[:-2])  # after an answer too
        assert client.recv(1) == b""


def test_a_body_and_an_answer_may_take_longer_than_a_head(locked, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    raw = json.dumps(BODY | {"max_tokens": 300}).encode()

    def slowly():
        yield raw[:5]
        time.sleep(0.7)
        yield raw[5:]

    answer = locked.client.post(PATH, content=slowly(), headers=key())
    assert answer.status_code == 200 and answer.elapsed.total_seconds() > 1


def test_too_many_waiting_are_sent_away(locked):
    statuses = []

    def ask():
        body = BODY | {"max_tokens": 100}
        answer = locked.post(PATH, body, headers=key())
        statuses.append((answer.status_code, answer.headers.get("retry-after")))

    threads = [threading.Thread(target=ask) for _ in range(7)]
    for thread in threads:
        thread.start()
        time.sleep(0.03)
    for thread in threads:
        thread.join()
    refused = [retry for status, retry in statuses if status == 429]
    assert refused and all(int(retry) >= 1 for retry in refused)
    assert {status for status, _ in statuses} == {200, 429}
    locked.settle()


def test_too_many_open_are_sent_away_before_their_bodies_come(serve):
    options = ServerOptions(names=("few",), limits=Limits(max_concurrent=2))
    few = serve(options)
    host, port = few.url.removeprefix("http://").split(":")
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n".encode()
    with ExitStack() as stack:
        for _ in range(2):  # whose bodies do not come
            client = stack.enter_context(socket.create_connection((host, int(port))))
            client.sendall(head)
        for _ in range(2000):
            if few.service.num_open == 2:
                break
            time.sleep(0.01)
        answer = few.post(PATH, BODY)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert "2 requests are open" in answer.json()["error"]["message"]
        assert few.client.get("/health").status_code == 200
    few.settle()
    assert few.post(PATH, BODY).status_code == 200


def test_a_request_has_its_time(serve):
    options = ServerOptions(names=("hurried",), limits=Limits(request_timeout=0.5))
    hurried = serve(options, max_model_len=4096, num_blocks=1100, delay=lambda: time.sleep(0.005))
    body = BODY | {"max_tokens": 4000}
    answer = hurried.post(PATH, body)
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "timeout"
    events = hurried.events(PATH, body)
    assert json.loads(events[-2])["error"]["code"] == "timeout" and events[-1] == "[DONE]"
    hurried.settle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(locked, stream):
    body = BODY | {"max_tokens": 4000, "n": 2, "stream": stream}
    for _ in range(3):
        if stream:
            with locked.client.stream("POST", PATH, json=body, headers=key()) as answer:
                assert next(answer.iter_lines()).startswith("data: ")
        else:
            with pytest.raises(httpx.ReadTimeout):
                locked.client.post(PATH, json=body, headers=key(), timeout=0.2)
        locked.settle()


def test_each_request_has_a_line_without_its_text(locked, caplog):
    with caplog.at_level(logging.INFO, "jaxdist.server"):
        answer = locked.post(PATH, BODY | {"prompt": "secret"}, headers=key())
        locked.settle()
    lines = [json.loads(record.message) for record in caplog.records]
    (line,) = [line for line in lines if line["id"] == answer.headers["x-request-id"]]
    assert line["status"] == 200 and line["completion_tokens"] == 4 and line["path"] == PATH
    assert "secret" not in caplog.text and "first-key" not in caplog.text


def test_while_stopping_nothing_new_is_served(locked):
    locked.service.draining = True
    try:
        answer = locked.post(PATH, BODY, headers=key())
        assert answer.status_code == 503 and "retry-after" in answer.headers
        assert locked.client.get("/ready").status_code == 503
        assert locked.client.get("/health").status_code == 200
    finally:
        locked.service.draining = False


def test_while_loading_nothing_is_served(locked):
    model, locked.service.model = locked.service.model, None
    try:
        answer = locked.post(PATH, BODY, headers=key())
        assert answer.status_code == 503 and "loaded" in answer.json()["error"]["message"]
        assert locked.client.get("/metrics").status_code == 200
        assert "loaded" in locked.client.get("/engine", headers=key()).json()["state"]
    finally:
        locked.service.model = model


def test_an_engine_that_fails_says_so(serve):
    def fail():
        raise RuntimeError("the device is gone")

    failed = serve(ServerOptions(names=("failed",)), delay=fail)
    answer = failed.post(PATH, BODY)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_error" and "device" not in answer.text
    assert failed.client.get("/health").status_code == 503
    assert failed.post(PATH, BODY).status_code == 503
