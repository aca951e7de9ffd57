"""A process that tries a grammar before the engine takes it: what would hang or crash stays there.

llguidance bounds its own work, but some grammars still cost it many seconds or the stack, and a
stack that overflows ends the process. Run as a script, which imports nothing but llguidance.
"""

import json
import os
import pickle
import random
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

SECONDS = 4.0  # to compile, and for the first steps
WAIT = 8.0  # seconds that a grammar waits for its turn
_AT_ONCE = 4  # grammars that are tried; more wait, and one that is slow holds up few
_START_SECONDS = 120.0  # for the process to begin, with its vocabulary
_STACK = 1 << 20  # bytes, an eighth of what the engine's threads have
_MEMORY = 4 << 30  # bytes of address space
_STEPS = 16  # taken at random after compiling
_SPECIAL = b"\xff"  # marks a token that is no text, in llguidance


class _Vocabulary:
    """What llguidance asks of a tokenizer: ids of text that a grammar leaves no choice about."""

    bos_token_id = None

    def __init__(
        self,
        tokens: list[bytes],
        special: list[int],
        eos_ids: list[int],
        encode: Callable[[str], Sequence[int]] | None,
    ):
        self.tokens, self.special_token_ids = list(tokens), special
        self.eos_token_id = eos_ids[0]
        self._encode = encode
        for i in special:
            self.tokens[i] = _SPECIAL + tokens[i]
        texts = (i for i in range(len(tokens)) if i not in set(special))
        self._ids = {tokens[i]: i for i in texts if tokens[i]}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> Sequence[int]:
        if self._encode is not None:
            ids = self._encode(text.decode(errors="replace"))
            # Some add a space to what they take for a text's begin.
            if b"".join(self.tokens[i] for i in ids) == text:
                return ids
        return self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        ids: list[int] = []
        while text:
            lengths = range(min(self._longest, len(text)), 0, -1)
            length = next((n for n in lengths if text[:n] in self._ids), 0)
            if not length:
                break  # a byte that no token has
            ids.append(self._ids[text[:length]])
            text = text[length:]
        return ids


def make_tokenizer(
    tokens: list[bytes],
    special: list[int],
    eos_ids: list[int],
    encode: Callable[[str], Sequence[int]] | None = None,
) -> LLTokenizer:
    """tokens: Bytes by id. special: Ids that are no text, `eos_ids` among them. encode: As the
    model knows text; the longest tokens by default."""
    vocabulary: Any = TokenizerWrapper(_Vocabulary(tokens, special, eos_ids, encode))
    return LLTokenizer(vocabulary, n_vocab=len(tokens), eos_token=eos_ids)


def start(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of a text; `is_error` where the grammar is refused."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))


class Checkers:
    """Some of them for one vocabulary, of which each begins when all before it are at work."""

    def __init__(self, tokens: list[bytes], special: list[int], eos_ids: list[int]):
        self._turns = threading.Semaphore(_AT_ONCE)
        # The one that was last at work is asked first: it has begun.
        self._idle = [Checker(tokens, special, eos_ids) for _ in range(_AT_ONCE)]

    def check(self, grammar: str) -> tuple[str | None, bool] | None:
        """As `Checker.check`; None where others took all the time."""
        if not self._turns.acquire(timeout=WAIT):
            return None
        checker = self._idle.pop()
        try:
            return checker.check(grammar)
        finally:
            self._idle.append(checker)
            self._turns.release()


class Checker:
    """Asks such a process. One grammar at a time; it is started anew when it has died."""

    def __init__(self, tokens: list[bytes], special: list[int], eos_ids: list[int]):
        self._vocabulary = (tokens, special, eos_ids)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: str, seconds: float = SECONDS) -> tuple[str | None, bool]:
        """(what is wrong with a grammar or None, whether it would be again)."""
        with self._lock:
            process = self._running()
            self._send(process, grammar)
            answer = self._answer(process, seconds)
            if answer is not None:
                return json.loads(answer) or None, True
            died = process.poll() is not None
            self._end(process)
            if died:
                return "it is too deep or too large", True
            return f"it takes more than {seconds:g} s to compile", False

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", os.path.abspath(__file__)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent
            )
            weakref.finalize(self, _kill, self._process)
            self._send(self._process, self._vocabulary)
            if self._answer(self._process, _START_SECONDS) is None:
                self._end(self._process)
                raise RuntimeError("the process that checks grammars does not start")
        return self._process

    def _send(self, process: subprocess.Popen[bytes], value: Any) -> None:
        assert process.stdin is not None
        try:
            pickle.dump(value, process.stdin)
            process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer will not come

    def _answer(self, process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        line = process.stdout.readline() if ready else b""
        if ready and not line:
            process.wait()
        return line or None

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        _kill(process)
        self._process = None


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # what was not sent any more


def _fault(tokenizer: LLTokenizer, grammar: str) -> str:
    """What is wrong with a grammar; empty where it compiles and some steps go well."""
    matcher = start(tokenizer, grammar)
    draw, eos = random.Random(0), set(tokenizer.eos_tokens)
    for step in range(_STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [i for i in range(tokenizer.vocab_size) if mask >> i & 1 and i not in eos]
        if not allowed:
            if not step and not matcher.is_accepting():
                return "no text conforms to it"
            break
        matcher.consume_token(draw.choice(allowed))
    return matcher.get_error()


def _main() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass  # not on this system
    threading.stack_size(_STACK)
    tokenizer = make_tokenizer(*pickle.load(sys.stdin.buffer))
    answer = ""
    while True:
        print(json.dumps(answer), flush=True)
        try:
            grammar = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer = "it cannot be compiled"

        def find(grammar: str = grammar) -> None:
            nonlocal answer
            answer = _fault(tokenizer, grammar)

        thread = threading.Thread(target=find)
        thread.start()
        thread.join()


if __name__ == "__main__":
    _main()
