"""Checks chat messages and brings them into the form that chat templates expect. Pure.

Every violation names its path, its value and what is allowed. Text only: other parts of content are refused.
"""

import json
from typing import Any

from kvern_engine.server.errors import ApiError
from kvern_engine.server.protocol import path_of, shown, unknown_field

ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = ("role", "content", "name")
_ROLE_FIELDS = {
    "assistant": ("tool_calls", "reasoning", "reasoning_content"),
    "tool": ("tool_call_id",),
}
# What OpenAI's client adds to an answer that is sent back as history: accepted where it says nothing.
_EMPTY_FIELDS = ("refusal", "audio", "annotations", "function_call", "tool_calls", "reasoning", "reasoning_content")
# Variables of well-known templates: accepted whatever the template is, since clients send them to every model.
_KNOWN_VARIABLES = frozenset({"enable_thinking", "thinking", "reasoning_effort", "date_string", "documents"})
_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "chat_template",
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
        "cls_token",
        "mask_token",
        "raise_exception",
        "strftime_now",
    }
)


def template_messages(messages: list[dict[str, Any]], knows_developer: bool) -> list[dict[str, Any]]:
    """Messages with content as one string each. Raises ApiError 400.

    A developer message becomes a system message where the template does not know the role.
    """
    return [_message(m, ("messages", i), knows_developer) for i, m in enumerate(messages)]


def _message(message: dict[str, Any], at: tuple[Any, ...], knows_developer: bool) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        path = path_of((*at, "role"))
        raise ApiError(f"{path} must be one of {', '.join(ROLES)}, got {shown(role)}.", param=path)
    allowed = (*_FIELDS, *_ROLE_FIELDS.get(role, ()))
    for name, value in message.items():
        if name not in allowed and not (name in _EMPTY_FIELDS and value in (None, [], "")):
            path = path_of((*at, name))
            raise ApiError(unknown_field(path, name, list(allowed)), param=path)
    out = {"role": "system" if role == "developer" and not knows_developer else role}
    calls = message.get("tool_calls") or None
    out["content"] = _content(message.get("content"), (*at, "content"), optional=calls is not None)
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        value = message.get(name)
        if value is not None:
            if not isinstance(value, str):
                path = path_of((*at, name))
                raise ApiError(f"{path} must be a string, got {shown(value)}.", param=path)
            out[name] = value
    if calls is not None:
        out["tool_calls"] = _tool_calls(calls, (*at, "tool_calls"))
    return out


def _content(content: Any, at: tuple[Any, ...], optional: bool) -> str:
    path = path_of(at)
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, list) or not content:
        rule = f"{path} must be a string or a non-empty array of text parts"
        raise ApiError(f"{rule}, got {shown(content)}.", param=path)
    return "\n".join(_text_part(part, (*at, i)) for i, part in enumerate(content))


def _text_part(part: Any, at: tuple[Any, ...]) -> str:
    path = path_of(at)
    if not isinstance(part, dict):
        raise ApiError(f'{path} must be an object {{"type": "text", "text": ...}}, got {shown(part)}.', param=path)
    kind = part.get("type")
    if kind != "text":
        raise ApiError(
            f'{path}.type must be "text", got {shown(kind)}: this model takes text only.', param=f"{path}.type"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise ApiError(f"{path}.text must be a string, got {shown(text)}.", param=f"{path}.text")
    for name in part.keys() - {"type", "text"}:
        raise ApiError(unknown_field(f"{path}.{name}", name, ["type", "text"]), param=f"{path}.{name}")
    return text


def _tool_calls(calls: Any, at: tuple[Any, ...]) -> list[dict[str, Any]]:
    """An assistant's earlier calls; templates want the arguments as an object, OpenAI sends them as JSON text."""
    path = path_of(at)
    shape = '{"id", "type": "function", "function": {"name", "arguments"}}'
    if not isinstance(calls, list):
        raise ApiError(f"{path} must be an array of {shape}, got {shown(calls)}.", param=path)
    out = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(f"{path}[{i}] must be {shape}, got {shown(call)}.", param=f"{path}[{i}]")
        arguments = function.get("arguments", "{}")
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) and arguments else arguments or {}
        except (ValueError, RecursionError):
            where = f"{path}[{i}].function.arguments"
            raise ApiError(f"{where} must be JSON text, got {shown(arguments)}.", param=where) from None
        out.append({**call, "function": {**function, "arguments": parsed}})
    return out


def check_template_kwargs(kwargs: dict[str, Any], variables: frozenset[str] | None) -> dict[str, Any]:
    """`chat_template_kwargs` that may reach a template: for variables that it reads. Raises ApiError 400."""
    for name, value in kwargs.items():
        path = f"chat_template_kwargs.{name}"
        if name in _RESERVED or name.startswith("_") or not name.isidentifier():
            raise ApiError(f"{path} is set by the server and cannot be given.", param=path)
        if variables is not None and name not in variables | _KNOWN_VARIABLES:
            known = sorted((variables | _KNOWN_VARIABLES) - _RESERVED)
            raise ApiError(f"{path}: the chat template does not know it; known are: {', '.join(known)}.", param=path)
        if len(json.dumps(value)) > 65_536:
            raise ApiError(f"{path} must be at most 65536 characters of JSON.", param=path)
    return kwargs
