"""The parent's side of `template_worker.py`: starts it, asks it, ends it when it hangs."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from jaxdist.config import UsageError
from jaxdist.server.errors import APIError

_WORKER = Path(__file__).with_name("template_worker.py")
_START_SECONDS = 60  # a busy machine may need that long to start an interpreter
_LONGEST_LINE = 2**28  # bytes


class TemplateProcess:
    """Renders one template in a process of its own, one text at a time."""

    def __init__(self, template: str, *, seconds: float = 5.0):
        """seconds: The most that one rendering may take."""
        self._template, self._seconds = template, seconds
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self.uses: frozenset[str] = frozenset()  # variables that the template reads

    async def start(self) -> None:
        """Compile the template. UsageError where it is not one."""
        async with self._lock:
            answer = await self._started()
        if "error" in answer:
            raise UsageError(f"the model's chat template cannot be read ({answer['error']})")

    async def render(self, variables: dict[str, Any]) -> str:
        """The text. APIError where the template refuses, fails or takes too long."""
        async with self._lock:
            try:
                if self._process is None or self._process.returncode is not None:
                    await self._started_again()
                answer = await self._ask({"variables": variables}, self._seconds)
            except BaseException:  # a half-read answer would be taken for the next one's
                await self._end()
                raise
        if "error" in answer:
            raise APIError(
                f"the model's chat template refuses these messages ({answer['error']})",
                param="messages",
                code="chat_template_error",
            )
        return answer["text"]

    async def close(self) -> None:
        """End the process."""
        async with self._lock:
            await self._end()

    async def _started_again(self) -> None:
        try:
            answer = await self._started()
        except OSError:  # no memory, or no file descriptor, for a process
            answer = {"error": "no process"}
        if "error" in answer:
            raise APIError(
                "the process that renders chats did not start; try again later",
                status=503,
                code="unavailable",
                headers={"retry-after": "5"},
            )

    async def _started(self) -> dict[str, Any]:
        await self._end()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", str(_WORKER)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_LONGEST_LINE,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        answer = await self._ask({"template": self._template}, _START_SECONDS)
        self.uses = frozenset(answer.get("uses", ()))
        return answer

    async def _ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(json.dumps(question).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            await self._end()
            return {"error": f"it took longer than {seconds:g} s"}
        except (ConnectionError, ValueError):
            line = b""
        if not line.endswith(b"\n"):
            await self._end()
            return {"error": "it needs too much memory"}
        return json.loads(line)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
