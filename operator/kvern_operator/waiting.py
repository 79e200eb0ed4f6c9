"""Waiting for an event with a time limit, so that whoever waits can still be cancelled.

Not `asyncio.wait_for`: before Python 3.12 it swallows a cancellation that comes in the same turn of the loop as what it
waits for (https://github.com/python/cpython/issues/86296), and a loop `while True` around it then never ends.
"""

import asyncio


async def wait_or_timeout(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until `event` is set, for at most `seconds` (None: without a limit). Returns whether it is set; a
    cancellation is always passed on. Others get a turn even where it is set already: callers are loops."""
    if event.is_set():
        await asyncio.sleep(0)
        return True
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True
