"""What a pod answers over HTTP, read to a bound: a pod is not trusted with this process's memory."""

import aiohttp

CHUNK = 2**16  # bytes


async def read_text(answer: aiohttp.ClientResponse, longest: int) -> str:
    """The body as UTF-8; ValueError where it has more than `longest` bytes."""
    body = bytearray()
    async for part in answer.content.iter_chunked(CHUNK):
        body += part
        if len(body) > longest:
            raise ValueError(f"an answer of over {longest} bytes")
    return body.decode("utf-8", "replace")
