"""A process of its own that compiles and renders chat templates: `chat_template.py` starts this file as a program.

A template is a program of the model's author, and Jinja's sandbox keeps it from Python's insides, not from filling the
memory or never ending. Here it may use so much processor time, memory and text, and what goes over takes at most this
process with it. So that it starts in a moment, the program imports Jinja and the standard library alone.

Over standard input and output go messages of JSON, each with its length in front (4 bytes, big-endian).
"""

import json
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from types import FrameType, TracebackType
from typing import Any, BinaryIO

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

HEADER = struct.Struct(">I")


class _OutOfTimeError(BaseException):
    """Raised by the timer in whatever runs; no `except Exception` of a template's helpers stops it."""


class _TooLongError(Exception):
    """The text is longer than the limit; `line` is where the template was."""

    def __init__(self, line: int | None) -> None:
        self.line = line


class _RefusedError(TemplateError):
    """The template calls raise_exception."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks an answer for training; for serving it is what stands inside."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own convention

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would put \u003c into prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise _RefusedError(str(message))


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as Hugging Face's templates expect it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class Renderer:
    """Holds the compiled templates and answers one request at a time, each within the limits."""

    def __init__(self, seconds: float, characters: int) -> None:
        self._seconds, self._characters = seconds, characters
        self._environment = _environment()
        self._templates: dict[str, Template] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"text": ...} or {"variables": [...]}; {"error": kind, "message", "template", "line"} where it fails."""
        name = request.get("name", "")
        try:
            with _ProcessorTime(self._seconds):
                if "sources" in request:
                    return self._compile(request["sources"])
                return {"text": self._render(name, request["variables"])}
        except _CompileError as error:
            return {"error": "syntax", "message": error.message, "template": error.template, "line": error.line}
        except _OutOfTimeError as error:
            return self._failure("time", "", name, error)
        except MemoryError as error:
            return self._failure("memory", "", name, error)
        except _TooLongError as error:
            return {"error": "length", "template": name, "line": error.line}
        except _RefusedError as error:
            return self._failure("refused", str(error.message), name, error)
        except RecursionError as error:
            return self._failure("failed", "it calls itself without end", name, error)
        except Exception as error:
            return self._failure("failed", str(error) or type(error).__name__, name, error)

    def _compile(self, sources: dict[str, str]) -> dict[str, Any]:
        variables: set[str] = set()
        for name, source in sources.items():
            try:
                variables |= meta.find_undeclared_variables(self._environment.parse(source))
                self._templates[name] = self._environment.from_string(source)
            except TemplateSyntaxError as error:
                raise _CompileError(name, error.lineno, error.message or "") from error
            except RecursionError as error:
                raise _CompileError(name, None, "it is nested too deeply") from error
            except _OutOfTimeError as error:
                raise _CompileError(name, None, f"it takes more than {self._seconds:g} seconds to compile") from error
            except MemoryError as error:
                raise _CompileError(name, None, "it takes too much memory to compile") from error
        return {"variables": sorted(variables)}

    def _render(self, name: str, variables: dict[str, Any]) -> str:
        template, pieces, length = self._templates[name], [], 0
        # Without Template.render: its tracebacks are rewritten, those of other exceptions than Exception are not.
        stream: Any = template.root_render_func(template.new_context(variables))
        for piece in stream:
            length += len(piece)
            if length > self._characters:
                raise _TooLongError(template.get_corresponding_lineno(stream.gi_frame.f_lineno))
            pieces.append(piece)
        return "".join(pieces)

    @staticmethod
    def _failure(kind: str, message: str, name: str, error: BaseException) -> dict[str, Any]:
        return {"error": kind, "message": message[:2000], "template": name, "line": _line(error.__traceback__)}


class _CompileError(Exception):
    def __init__(self, template: str, line: int | None, message: str) -> None:
        self.template, self.line, self.message = template, line, message


def _line(traceback: TracebackType | None) -> int | None:
    """The template's line that an error came from: the innermost one."""
    found = None
    while traceback is not None:
        template = traceback.tb_frame.f_globals.get("__jinja_template__")
        if template is not None:
            found = template.get_corresponding_lineno(traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


class _ProcessorTime:
    """Raises _OutOfTimeError in its block after so many seconds of processor time. A single call into C that never
    comes back to Python is ended by the kernel, with the process, two seconds later."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + self._seconds) + 2, hard))
        signal.setitimer(signal.ITIMER_PROF, self._seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _out_of_time(signum: int, frame: FrameType | None) -> None:
    raise _OutOfTimeError


def _messages(stream: BinaryIO) -> Iterator[bytes]:
    while len(header := stream.read(HEADER.size)) == HEADER.size:
        yield stream.read(HEADER.unpack(header)[0])


def main(seconds: float, characters: int, megabytes: int) -> None:
    """Answers requests until standard input ends."""
    signal.signal(signal.SIGPROF, _out_of_time)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with whoever started it
    for limit, value in (
        (resource.RLIMIT_AS, megabytes << 20),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        try:
            resource.setrlimit(limit, (value, value))
        except (ValueError, OSError):  # a system without this limit, or with a lower one
            continue
    renderer = Renderer(seconds, characters)
    output = sys.stdout.buffer
    for message in _messages(sys.stdin.buffer):
        answer = renderer.answer(json.loads(message))
        raw = json.dumps(answer).encode()
        output.write(HEADER.pack(len(raw)) + raw)
        output.flush()
        if answer.get("error") == "memory":
            return  # what is left of the memory is in pieces: the next request gets a fresh process


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
