"""Finds, compiles and renders a model's Jinja chat template the way Hugging Face templates expect.

Templates come with the model and run in Jinja's immutable sandbox. Which extra variables a client may set is decided
by the server, not here. Jinja is imported when the first template is compiled.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The chat template is missing or broken, or it rejects the messages; the text is fit for the client."""


class ChatTemplate:
    """A compiled set of named templates; "default" is used unless tools are given and there is a "tool_use".

    `variables` are the model's special tokens by name (`bos_token`, ...). Raises ChatTemplateError for a syntax error.
    """

    def __init__(self, sources: dict[str, str], variables: dict[str, str]) -> None:
        self.sources = sources
        self.variables = variables
        self._compiled = {name: _compile(source) for name, source in sources.items()}

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The prompt text of a conversation. Content given as a list of text parts is joined by line breaks.

        `kwargs` are passed to the template (`tools`, `documents`, `enable_thinking`, ...). Raises ChatTemplateError.
        """
        name = "tool_use" if kwargs.get("tools") and "tool_use" in self._compiled else "default"
        variables: dict[str, Any] = {"tools": None, "documents": None, **self.variables, **kwargs}
        variables.update(messages=[_flat(m) for m in messages], add_generation_prompt=add_generation_prompt)
        try:
            return self._compiled[name].render(variables)
        except ChatTemplateError:
            raise
        except Exception as error:  # a template is a program of the model's author: it may fail in any way
            raise ChatTemplateError(f"the chat template cannot render these messages: {error}") from error


def read_sources(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Templates of a model folder by name; chat_template.jinja comes before tokenizer_config.json."""
    own = tokenizer_config.get("chat_template")
    if isinstance(own, list):
        sources = {entry["name"]: entry["template"] for entry in own}
        if sources and "default" not in sources:
            sources["default"] = next(iter(sources.values()))
    else:
        sources = {"default": own} if own else {}
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        sources["default"] = separate.read_text(encoding="utf-8")
    return sources


def read_override(value: str) -> dict[str, str]:
    """Template given by the user: a file, or the template itself where the text holds Jinja's braces."""
    if "{{" in value or "{%" in value:
        return {"default": value}
    path = Path(value).expanduser()
    if not path.is_file():
        raise ChatTemplateError(f"chat_template: no such file {value!r}; give a file with a Jinja template")
    return {"default": path.read_text(encoding="utf-8")}


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ChatTemplateError(f"content part of type {kind!r} is not supported; this model takes text parts only")
    return {**message, "content": "\n".join(part.get("text", "") for part in content)}


def _compile(source: str) -> "Template":
    from jinja2 import TemplateSyntaxError

    try:
        return _environment().from_string(source)
    except TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the chat template is not valid Jinja (line {error.lineno}): {error.message}"
        ) from error


@cache
def _environment() -> "ImmutableSandboxedEnvironment":
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}` marks an answer for training; for serving it is what stands inside."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own convention

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would put \u003c into prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> Iterator[str]:
    raise ChatTemplateError(message)
