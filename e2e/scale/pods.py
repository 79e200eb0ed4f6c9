#!/usr/bin/env python3
"""Plays the admin port of every engine pod at once: one server on all addresses, who is asked is told by the address.

    pods.py [PORT]      8001 where none is given; runs until it is killed

An engine that is idle, and drains or takes it back as it is told. Nothing is checked, least of all the token: what is
measured is the operator.
"""

import asyncio
import contextlib
import json
import sys

LAYOUT = {"feasible": [{"size": 1, "kvTokens": 100_000}], "device": "sim"}
draining: set[str] = set()  # addresses


def answer(method: str, path: str, address: str) -> bytes:
    """The body for one question."""
    if path.startswith("/admin/layout"):
        return json.dumps(LAYOUT).encode()
    if method == "POST":
        draining.add(address)
    elif method == "DELETE":
        draining.discard(address)
    return json.dumps({"draining": address in draining, "in_flight": 0}).encode()


class Engine(asyncio.Protocol):
    """One connection. Requests have no body, so each ends at its empty line."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._address = transport, transport.get_extra_info("sockname")[0]
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        while b"\r\n\r\n" in self._data:
            head, _, self._data = self._data.partition(b"\r\n\r\n")
            method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
            body = answer(method, path, self._address)
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            self._transport.write(head + body)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "0.0.0.0", port, backlog=4096)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(int(sys.argv[1]) if len(sys.argv) > 1 else 8001))
