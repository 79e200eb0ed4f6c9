"""Finds a model's Jinja chat templates and renders them, in a process of their own with limits on processor time,
memory and length (`template_process.py`).

Which extra variables a client may set is decided by the server, not here.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from kvern_engine.loading.fields import ModelConfigError, read_json

SECONDS = 10.0  # of processor time for one conversation
MAX_CHARACTERS = 1 << 24
MAX_MEGABYTES = 1024
_WALL = 6  # times the processor time: on a machine with much to do a process has to wait
_MAX_SOURCE = 1 << 20  # characters of all templates of a model; the longest known have some 20,000
_ENVIRONMENT = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")  # no secrets for a template
_PROGRAM = Path(__file__).with_name("template_process.py")
_HEADER_BYTES = 4


class ChatTemplateError(ValueError):
    """The chat template is missing or broken, or it rejects the messages; the text is fit for the client."""


class ChatTemplateTimeoutError(ChatTemplateError, TimeoutError):
    """The chat template takes too long."""


class ChatTemplate:
    """A set of named templates; "default" is used unless tools are given and there is a "tool_use".

    `variables` are the model's special tokens by name (`bos_token`, ...). The process starts at once; `check` waits
    until the templates are compiled. A process renders one conversation at a time; long ones have a second process, so
    that short ones need not wait for them.
    """

    def __init__(self, sources: dict[str, str], variables: dict[str, str], seconds: float = SECONDS) -> None:
        for name, source in sources.items():
            if not isinstance(source, str):
                raise ChatTemplateError(f"the chat template {name} must be text, got {type(source).__name__}")
        length = sum(map(len, sources.values()))
        if length > _MAX_SOURCE:
            raise ChatTemplateError(f"the chat templates have {length:,} characters; at most {_MAX_SOURCE:,} are read")
        self.sources = sources
        self.variables = variables
        self._seconds = seconds
        self._short, self._long = _Lane(sources, seconds), _Lane(sources, seconds)
        self._short.start()

    def check(self) -> frozenset[str]:
        """Names of the variables that the templates read. Raises ChatTemplateError where one is not valid Jinja."""
        return self._short.known()

    def render(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, long: bool = False, **kwargs: Any
    ) -> str:
        """The prompt text of a conversation. Content given as a list of text parts is joined by line breaks.

        `long`: it may take a while. `kwargs` are passed to the template (`tools`, `documents`, `enable_thinking`, ...),
        as JSON values. Raises ChatTemplateError, for a template that takes too long ChatTemplateTimeoutError.
        """
        name = "tool_use" if kwargs.get("tools") and "tool_use" in self.sources else "default"
        variables: dict[str, Any] = {"tools": None, "documents": None, **self.variables, **kwargs}
        variables.update(messages=[_flat(m) for m in messages], add_generation_prompt=add_generation_prompt)
        try:
            request = json.dumps({"name": name, "variables": variables}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(f"messages must be values of JSON: {error}") from None
        answer = (self._long if long else self._short).ask(request, name)
        if "text" in answer:
            return str(answer["text"])
        raise self._error(answer)

    def _error(self, answer: dict[str, Any]) -> ChatTemplateError:
        where = _where(answer)
        kind, message = answer["error"], answer.get("message", "")
        if kind == "time":
            return ChatTemplateTimeoutError(
                f"the chat template takes more than {self._seconds:g} seconds of processor time for these messages "
                f"({where})"
            )
        if kind == "memory":
            text = f"the chat template needs more than {MAX_MEGABYTES:,} MiB of memory for these messages"
        elif kind == "length":
            text = f"the chat template makes more than {MAX_CHARACTERS:,} characters of these messages"
        elif kind == "refused":
            text = f"the chat template refuses these messages: {message}"
        else:
            text = f"the chat template cannot render these messages: {message}"
        return ChatTemplateError(f"{text} ({where})")


def _where(answer: dict[str, Any]) -> str:
    line = answer.get("line")
    return f"template {answer.get('template') or 'default'}" + (f", line {line}" if line is not None else "")


class _Lane:
    """A process that threads share one after the other; a fresh one follows one that a conversation has ended."""

    def __init__(self, sources: dict[str, str], seconds: float) -> None:
        self._sources, self._seconds = sources, seconds
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._known: frozenset[str] | None = None  # once the process has compiled the templates

    def start(self) -> None:
        """Starts the process without waiting for it."""
        self._process = _Process(self._sources, self._seconds)

    def known(self) -> frozenset[str]:
        """The variables that the templates read. Raises ChatTemplateError where one is not valid Jinja."""
        with self._lock:
            return self._wait()

    def _wait(self) -> frozenset[str]:
        if self._process is None:
            self.start()
        assert self._process is not None
        if self._known is None:
            self._known = self._process.wait_compiled()
        return self._known

    def ask(self, request: bytes, name: str) -> dict[str, Any]:
        """The answer about template `name`."""
        with self._lock:
            self._wait()
            assert self._process is not None
            try:
                answer = self._process.ask(request)
            except _GoneError:
                answer = {"error": "time", "template": name, "line": None}
            except BaseException:  # interrupted: the answer that still comes would be taken for the next one
                self._end()
                raise
            if answer.get("error") in ("time", "memory"):
                self._end()
            return answer

    def _end(self) -> None:
        if self._process is not None:
            self._process.stop()
        self._process, self._known = None, None


class _GoneError(Exception):
    """The process has ended, or does not answer."""


class _Process:
    """The running program of `template_process.py`, stopped with its owner."""

    def __init__(self, sources: dict[str, str], seconds: float) -> None:
        self._sources, self._seconds = sources, seconds
        # -I: neither the current folder nor the environment gets a say in what is imported.
        command = [sys.executable, "-I", str(_PROGRAM), str(seconds), str(MAX_CHARACTERS), str(MAX_MEGABYTES)]
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, close_fds=True
        )
        self.stop = weakref.finalize(self, _stop, self._popen)
        self._deadline = 0.0
        with contextlib.suppress(_GoneError):  # `wait_compiled` says it
            self._send(json.dumps({"sources": sources}).encode())

    def wait_compiled(self) -> frozenset[str]:
        """The variables that the templates read. Raises ChatTemplateError where they cannot be compiled."""
        try:
            answer = self._receive()
        except _GoneError:
            self.stop()
            raise ChatTemplateError(
                f"the chat template takes more than {self._seconds:g} seconds to compile, or its process cannot run: "
                f"{_PROGRAM.name} ended with status {self._popen.returncode}"
            ) from None
        if "variables" in answer:
            return frozenset(answer["variables"])
        self.stop()
        message = answer.get("message") or answer["error"]
        raise ChatTemplateError(f"the chat template is not valid Jinja ({_where(answer)}): {message}")

    def ask(self, request: bytes) -> dict[str, Any]:
        """The answer to a request. Raises _GoneError."""
        self._send(request)
        return self._receive()

    def _send(self, message: bytes) -> None:
        self._deadline = time.monotonic() + _WALL * self._seconds + 5
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(len(message).to_bytes(_HEADER_BYTES, "big") + message)
            self._popen.stdin.flush()
        except (OSError, ValueError):
            raise _GoneError from None

    def _receive(self) -> dict[str, Any]:
        size = int.from_bytes(self._read(_HEADER_BYTES), "big")
        answer: dict[str, Any] = json.loads(self._read(size))
        return answer

    def _read(self, size: int) -> bytes:
        assert self._popen.stdout is not None
        fd, pieces = self._popen.stdout.fileno(), []
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while size:
            left = self._deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise _GoneError
            piece = os.read(fd, min(size, 1 << 20))
            if not piece:
                raise _GoneError
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


def _stop(popen: "subprocess.Popen[bytes]") -> None:
    for stream in (popen.stdin, popen.stdout):
        assert stream is not None
        with contextlib.suppress(OSError):
            stream.close()
    popen.kill()
    popen.wait()


def read_sources(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Templates of a model folder by name; chat_template.jinja comes before chat_template.json, before
    tokenizer_config.json, and further ones may lie in additional_chat_templates. Raises ChatTemplateError."""
    own = tokenizer_config.get("chat_template")
    as_json = folder / "chat_template.json"
    if as_json.is_file():
        try:
            own = read_json(as_json).get("chat_template") or own
        except ModelConfigError as error:
            raise ChatTemplateError(str(error)) from None
    sources = _named(own, folder)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = _text(path)
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        sources["default"] = _text(separate)
    if sources and "default" not in sources:
        sources["default"] = next(iter(sources.values()))
    return sources


def _named(own: Any, folder: Path) -> dict[str, str]:
    if not own:
        return {}
    if isinstance(own, str):
        return {"default": own}
    entries = [{"name": name, "template": text} for name, text in own.items()] if isinstance(own, dict) else own
    sources = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise ChatTemplateError(
                f"{folder}: chat_template must be a template or a list of objects with name and template"
            )
        sources[name] = text
    return sources


def read_override(value: str) -> dict[str, str]:
    """Template given by the user: a file, or the template itself where the text holds Jinja's braces."""
    if "{{" in value or "{%" in value:
        return {"default": value}
    path = Path(value).expanduser()
    if not path.is_file():
        raise ChatTemplateError(f"chat_template: no such file {value!r}; give a file with a Jinja template")
    return {"default": _text(path)}


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > 4 * _MAX_SOURCE:
            raise ChatTemplateError(f"{path}: {path.stat().st_size:,} bytes; at most {4 * _MAX_SOURCE:,} are read")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(f"{path}: cannot be read as text in UTF-8: {error}") from error


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ChatTemplateError(f"content part of type {kind!r} is not supported; this model takes text parts only")
    return {**message, "content": "\n".join(part.get("text", "") for part in content)}
