"""Malformed requests, generated: a server refuses each with a reason, lives, and keeps nothing.

    python scripts/malformed.py URL --pid PID --count 10000

One seed sends the same requests again. Each is answered by 200 or 4xx; afterwards no block is held,
and the memory of the process PID (Linux) is what it was after the first tenth of them.
"""

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

MOST_GROWTH = 16 * 2**20  # bytes of resident memory, whatever the count
_FREE = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
_NUMBERS = [-1, 0, 2**31, 2**63, -(2**70), 0.5, -0.0, 1e308]
_TEXTS = ["", "\0", "é" * 50, "x" * 20_000, "auto", "required"]
_LISTS: list[Any] = [[], [[]], [None], [-1], [10**9], ["a"] * 300, [[1], "a"]]
_OBJECTS: list[dict[str, Any]] = [
    {},
    {"type": "no"},
    {"a": {"b": []}},
    {"type": "json_object"},
    {"regex": "(a"},
    {"choice": []},
    {"grammar": "a"},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "no"}}},
    {"type": "function", "function": {"name": "f"}},
]
_ODD: list[Any] = [None, True, *_NUMBERS, *_TEXTS, *_LISTS, *_OBJECTS]
_FIELDS = (
    "model prompt messages input n max_tokens temperature top_p top_k min_p seed stop stream echo "
    "stream_options logit_bias logprobs top_logprobs response_format structured_outputs tools "
    "tool_choice bad_words allowed_token_ids stop_token_ids prompt_logprobs dimensions pooling "
    "guided_regex cache_salt priority truncate_prompt_tokens documents chat_template_kwargs tokens "
    "continue_final_message suffix best_of min_tokens encoding_format max_completion_tokens"
).split()
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/embeddings": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [65]},
}
_METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "POST")


@dataclass
class Found:
    """What has come of it.

    Attributes:
        statuses: How often each was answered; 0 where the client left.
        faults: What must not be, one line each.
        growth: Bytes of resident memory after the first tenth; None where nobody looked.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    growth: int | None = None


def send_all(url: str, count: int, seed: int = 0, pid: int | None = None) -> Found:
    """Send them, and look after the server."""
    rng, found, before = random.Random(seed), Found(), None
    with httpx.Client(base_url=url, timeout=60) as client:
        for i in range(count):
            kind = rng.choice(_KINDS)
            try:
                status, text = kind(client, rng)
            except httpx.HTTPError as error:
                found.faults.append(f"request {i}, {kind.__name__}: {error!r}")
                break
            found.statuses[status] += 1
            if status >= 500 or (status >= 400 and '"message":' not in text and text):
                found.faults.append(f"request {i}, {kind.__name__}: {status} {text[:200]}")
            if pid is not None and i == count // 10:
                before = _resident(pid)
        found.faults += _left(client)
    if pid is not None and before is not None:
        found.growth = _resident(pid) - before
        if found.growth > MOST_GROWTH:
            found.faults.append(f"memory grew by {found.growth} bytes; at most {MOST_GROWTH}")
    return found


def _answer(client: httpx.Client, method: str, path: str, **how: Any) -> tuple[int, str]:
    answer = client.request(method, path, **how)
    return answer.status_code, answer.text


def _changed(rng: random.Random) -> tuple[str, dict[str, Any]]:
    path = rng.choice([*_BODIES])
    changes = {rng.choice(_FIELDS): _value(rng) for _ in range(rng.randint(1, 3))}
    return path, _BODIES[path] | changes


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6)
    if kind == 0 and depth < 4:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 1 and depth < 4:
        keys = [rng.choice([*_FIELDS, "type", "name", "role", "content"]) for _ in range(3)]
        return {key: _value(rng, depth + 1) for key in keys}
    return rng.choice(_ODD)


def _fields(client: httpx.Client, rng: random.Random) -> tuple[int, str]:
    """A body with fields that are wrong."""
    path, body = _changed(rng)
    return _answer(client, "POST", path, json=body)


def _broken(client: httpx.Client, rng: random.Random) -> tuple[int, str]:
    """A body that is cut, or in which bytes are others."""
    path, body = _changed(rng)
    raw = bytearray(json.dumps(body).encode())
    for _ in range(rng.randrange(3)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return _answer(client, "POST", path, content=bytes(raw[: rng.randint(0, len(raw))]))


def _nested(client: httpx.Client, rng: random.Random) -> tuple[int, str]:
    """A body that is deep."""
    depth, path = rng.choice([100, 1000, 100_000]), rng.choice([*_BODIES])
    begin, end = rng.choice([("[", "]"), ('{"a":', "}")])
    inner = (begin * depth + "1" + end * depth).encode()
    return _answer(client, "POST", path, content=b'{"documents":[' + inner + b"]}")


def _elsewhere(client: httpx.Client, rng: random.Random) -> tuple[int, str]:
    """Another method, path or header."""
    path = rng.choice(
        [*_BODIES, "/v1", "/v1/models/%00", "/../x", "/engine?stream=9", "/" + "x" * 5000]
    )
    headers = {
        "authorization": rng.choice(["", "Bearer", "Bearer x", "Basic \xff"]).encode("latin-1")
    }
    headers["content-type"] = rng.choice([b"", b"text/plain", b"application/json; charset=utf-7"])
    return _answer(client, rng.choice(_METHODS), path, content=rng.randbytes(9), headers=headers)


def _gone(client: httpx.Client, rng: random.Random) -> tuple[int, str]:
    """A stream whose reader leaves."""
    body = {"prompt": "a", "max_tokens": 200, "n": rng.randint(1, 3), "stream": True}
    with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
        if answer.status_code != 200:
            answer.read()
            return answer.status_code, answer.text
        next(answer.iter_raw())
    return 0, ""


_Kind = Callable[[httpx.Client, random.Random], tuple[int, str]]
_KINDS: list[_Kind] = [*[_fields] * 4, *[_broken] * 2, _nested, _elsewhere, _gone]


def _left(client: httpx.Client) -> list[str]:
    """What the server has not given back, and whether it still serves."""
    faults: list[str] = []
    for _ in range(100):
        lines = client.get("/metrics").text.splitlines()
        faults = [x for x in lines if x.startswith(_FREE) and float(x.rsplit(" ", 1)[1]) > 0]
        if not faults:
            break
        time.sleep(0.1)
    answer = client.post("/v1/completions", json=_BODIES["/v1/completions"])
    return faults + ([] if answer.status_code == 200 else [f"it serves no more: {answer.text}"])


def _resident(pid: int) -> int:
    """Bytes of memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """0 where all is well, 1 where a fault was found, 2 where no server answers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--pid", type=int, help="of the server, to look at its memory")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        httpx.get(args.url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        print(f"malformed: no server answers at {args.url}: {error}", file=sys.stderr)
        return 2
    began = time.monotonic()
    found = send_all(args.url, args.count, args.seed, args.pid)
    counts = ", ".join(f"{count} x {status}" for status, count in sorted(found.statuses.items()))
    grown = "" if found.growth is None else f", memory grew by {found.growth / 2**20:.1f} MiB"
    print(f"{counts} in {time.monotonic() - began:.0f} s{grown}")
    for fault in found.faults:
        print(f"FAULT: {fault}")
    return bool(found.faults)


if __name__ == "__main__":
    sys.exit(main())
