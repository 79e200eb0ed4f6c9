"""What an answer cost, in tokens, read off its bytes as they pass. Pure.

An engine says it at the end: in the `usage` of a JSON answer or of a stream's last event, or, where a client did not
ask for that, in a comment of the event stream that Kvern's engine adds for a router that sends REQUEST_HEADER; it is
taken out again here. Until the end, and of an answer that never gets there, every event counts as one token.
"""

from __future__ import annotations

import re

REQUEST_HEADER = b"x-kvern-usage: comment\r\n"
TAIL = 4096  # bytes at the end of an answer that are looked at for its usage
_COMMENT = re.compile(rb": kvern-usage (\d{1,12}) (\d{1,12})\n\n?")
# A quote within a JSON string is escaped: these names cannot come out of what a model has written.
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,12})')
_OUTPUT = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,12})')


class Usage:
    """Fed with the body of one answer. events: it is an event stream, in whole lines; strip: the comment may be taken
    out of it (its length was not announced)."""

    __slots__ = ("_events", "_strip", "_tail", "counted", "output", "prompt")

    def __init__(self, events: bool, strip: bool = True) -> None:
        self._events = events
        self._strip = strip
        self._tail = b""
        self.counted = 0  # events with content so far
        self.prompt: int | None = None
        self.output: int | None = None

    def feed(self, data: bytes) -> bytes:
        """Bytes of the body; returns what the client is to get of them."""
        if self._events:
            if b": kvern-usage " in data and (found := _COMMENT.search(data)) is not None:
                self.prompt, self.output = int(found[1]), int(found[2])
                if self._strip:
                    data = data[: found.start()] + data[found.end() :]
            self.counted += data.count(b"\ndata: {") + data.startswith(b"data: {")
        self._tail = data[-TAIL:] if len(data) >= TAIL else (self._tail + data)[-TAIL:]
        return data

    def total(self, status: int, estimated_prompt: int) -> int:
        """Tokens of prompt and answer as far as they are known; of an answer that is an error, none."""
        if status >= 400 and not self.counted:
            return 0
        if self.prompt is None and (prompts := _PROMPT.findall(self._tail)):
            self.prompt = int(prompts[-1])
            outputs = _OUTPUT.findall(self._tail)
            self.output = int(outputs[-1]) if outputs else None
        prompt = estimated_prompt if self.prompt is None else self.prompt
        return prompt + (self.counted if self.output is None else self.output)
