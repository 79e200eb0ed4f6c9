"""The API server as a script uses it: create, list, watch, with a token. Nothing of the operator's own client."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp

Object = dict[str, Any]
SERVICES = "/apis/kvern.dev/v1alpha1"


@dataclass(frozen=True)
class Access:
    """Where the API server is and how to come in. `ca` is the path of a certificate, "" for plain HTTP."""

    url: str
    token: str = ""
    ca: str = ""


class RefusedError(RuntimeError):
    """The API server said no; the text is what it said."""


class Api:
    """One connection pool, used as `async with`."""

    def __init__(self, access: Access) -> None:
        tls = ssl.create_default_context(cafile=access.ca) if access.ca else None
        self._session = aiohttp.ClientSession(
            access.url,
            headers={"Authorization": f"Bearer {access.token}"},
            connector=aiohttp.TCPConnector(ssl=tls or True, limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            read_bufsize=2**20,
        )

    async def __aenter__(self) -> "Api":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def request(self, method: str, path: str, body: Object | None = None, kind: str = "application/json") -> Any:
        """The JSON of an answer. Raises RefusedError."""
        data = json.dumps(body) if body is not None else None
        async with self._session.request(method, path, data=data, headers={"Content-Type": kind}) as answer:
            text = await answer.text()
            if answer.status >= 300:
                raise RefusedError(f"{method} {path}: {answer.status} {text[:500]}")
            return json.loads(text)

    async def create(self, path: str, body: Object) -> None:
        """POST to a collection."""
        await self.request("POST", path, body)

    async def namespace(self, name: str) -> None:
        """A namespace of that name."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        await self.create("/api/v1/namespaces", {"kind": "Namespace", "metadata": {"name": name, "labels": labels}})

    async def count(self, path: str, selector: str = "") -> int:
        """How many objects a collection holds: of the API server's own count, without reading them."""
        query = f"?limit=1{f'&labelSelector={selector}' if selector else ''}"
        found = await self.request("GET", path + query)
        remaining = found["metadata"].get("remainingItemCount")
        if remaining is None and found["metadata"].get("continue"):  # not counted where a selector is given
            return len(await self.names(path, selector))
        return len(found["items"]) + int(remaining or 0)

    async def names(self, path: str, selector: str = "") -> list[str]:
        """The names of a collection's objects."""
        found: list[str] = []
        token = ""
        while True:
            query = f"?limit=500&labelSelector={selector}&continue={token}"
            page = await self.request("GET", path + query)
            found += [item["metadata"]["name"] for item in page["items"]]
            token = page["metadata"].get("continue") or ""
            if not token:
                return found

    async def total(self, path: str, metric: str) -> float:
        """The sum of all series of a metric, on a page of Prometheus' text."""
        async with self._session.get(path) as answer:
            lines = (await answer.text()).splitlines()
        series = (line.rpartition(" ") for line in lines if line.startswith(metric))
        return sum(float(value) for name, _, value in series if name.partition("{")[0] == metric)

    async def watch(self, path: str) -> AsyncIterator[Object]:
        """Events of a collection from now on, also after the API server has ended the stream."""
        version = (await self.request("GET", f"{path}?limit=1"))["metadata"]["resourceVersion"]
        while True:
            query = f"?watch=true&allowWatchBookmarks=true&resourceVersion={version}"
            async with self._session.get(path + query) as stream:
                buffer = b""
                async for data in stream.content.iter_any():
                    *lines, buffer = (buffer + data).split(b"\n")
                    for line in lines:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            raise RefusedError(f"watch {path}: {event['object']}")
                        version = event["object"]["metadata"]["resourceVersion"]
                        if event["type"] != "BOOKMARK":
                            yield event
            await asyncio.sleep(0.1)
