"""Work on long texts, off the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
LONG = 20_000  # what takes longer must not hold up other requests


async def aside(size: int, work: Callable[..., Result], *given: object) -> Result:
    """`work(*given)`; in a thread where `size`, of characters or tokens, is above LONG."""
    return await asyncio.to_thread(work, *given) if size > LONG else work(*given)
