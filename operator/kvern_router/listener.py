"""A listener's end, without a reset for whom the system has let in and nobody has greeted yet."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections.abc import Callable
from typing import Any


async def close_listener(server: asyncio.Server | None, factory: Callable[[], asyncio.Protocol]) -> None:
    """Take what waits in the backlog, then nothing more: closing alone would reset it."""
    if server is None or not server.sockets:
        return
    # Copies: the loop's own are closed first, and the last one to be closed is what ends the listening.
    copies = [socket.socket(fileno=os.dup(each.fileno())) for each in server.sockets]
    server.close()
    loop = asyncio.get_running_loop()
    taken: list[socket.socket] = []
    for copy in copies:
        with copy, contextlib.suppress(OSError):  # BlockingIOError: nobody is left
            copy.setblocking(False)
            while True:
                taken.append(copy.accept()[0])
    for each in taken:
        each.setblocking(False)
        with contextlib.suppress(OSError):
            await loop.connect_accepted_socket(factory, each)


def has_unread(sock: Any) -> bool:
    """Whether bytes have come that the loop has not read yet, or an end: closing now would be the answer to them."""
    if sock is None or sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))
