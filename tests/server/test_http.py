"""Answers that take long: signs of life, and what becomes of refusals in the midst."""

import asyncio
import json

import pytest

from jaxdist.server import http
from jaxdist.server.errors import APIError
from jaxdist.server.responses import Text


@pytest.fixture
def send(monkeypatch):
    """send(seconds, error, leave): the messages of an answer that takes so many seconds."""
    monkeypatch.setattr(http, "PATIENCE", 0.02)

    def run(seconds, error=None, leave=None):
        messages, ended = [], []

        async def work():
            try:
                await asyncio.sleep(seconds)
            finally:
                ended.append(True)
            if error is not None:
                raise error
            return Text(prompt="a")

        async def receive():
            await asyncio.sleep(60 if leave is None else leave)
            return {"type": "http.disconnect"}

        async def take(message):
            messages.append(message)

        try:
            asyncio.run(http.LongAnswer(work())({"type": "http"}, receive, take))
        finally:
            assert ended
        return messages

    return run


def test_an_answer_at_once_is_one_piece(send):
    start, body = send(0)
    assert (start["status"], dict(start["headers"])[b"content-length"]) == (200, b"14")
    assert json.loads(body["body"]) == {"prompt": "a"} and not body.get("more_body")


def test_one_that_takes_long_begins_with_spaces(send):
    start, *pieces = send(0.1)
    assert start["status"] == 200
    assert dict(start["headers"]) == {b"content-type": b"application/json"}
    assert [piece["body"] for piece in pieces[:-1]] == [b" "] * (len(pieces) - 1)
    assert [piece["more_body"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert len(pieces) > 2 and json.loads(b"".join(p["body"] for p in pieces)) == {"prompt": "a"}


def test_a_refusal_before_the_first_sign_is_one_and_after_it_cuts_the_answer_off(send):
    with pytest.raises(APIError):
        send(0, APIError("no"))
    messages = send(0.1, APIError("no"))
    assert messages[0]["status"] == 200 and all(m["more_body"] for m in messages[1:])
    with pytest.raises(ZeroDivisionError):  # a fault of ours is told to the log
        send(0.1, ZeroDivisionError())


@pytest.mark.parametrize("seconds", [0.01, 0.05])
def test_a_client_that_leaves_ends_the_work(send, seconds):
    assert send(60, leave=seconds)[-2]["status"] == 499
