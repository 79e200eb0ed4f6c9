"""Ends of sockets that no client takes for an error: a listener's, without a reset for whom the system has let in and
nobody has greeted yet, and a connection's."""

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
    for copy in copies:
        with copy:
            copy.setblocking(False)
            while (taken := _accepted(copy)) is not None:
                taken.setblocking(False)
                try:
                    await loop.connect_accepted_socket(factory, taken)
                except OSError:
                    taken.close()


def _accepted(listening: socket.socket) -> socket.socket | None:
    """The next one that waits; None where nobody does, or this process can open no more files."""
    while True:
        try:
            return listening.accept()[0]
        except ConnectionAbortedError:  # it did not wait for it
            continue
        except OSError:
            return None


def has_unread(sock: Any) -> bool:
    """Whether bytes have come that the loop has not read yet, or an end: closing now would be the answer to them."""
    if sock is None or sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def hold_back(sock: Any) -> None:
    """What is written from now on leaves with the end of the connection, in one segment (TCP_CORK). Who reads it can
    see that the connection has ended; sent one after the other, a client could send its next request between them."""
    option = getattr(socket, "TCP_CORK", None)  # Linux
    if option is not None and sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, 1)
