"""Log text -> the line that says why a program ended, or what it does. Pure; reads both plain and key=value lines."""

import re
import shlex

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TELLING = re.compile(r"error|exception|fatal|killed|cannot|could not|not found|no such|refused|to serve at", re.I)
_NOISE = re.compile(r"^(\s|Traceback|During handling|The above exception|\^|File \")")
LONGEST = 300


def plain_lines(text: str) -> list[str]:
    """Lines without colours; of a line rewritten in place, what it ended as."""
    lines = [_ANSI.sub("", line).rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return [line for line in lines if line.strip()]


def pairs(line: str) -> dict[str, str]:
    """The fields of a key=value log line; none where it is not one."""
    try:
        found = dict(part.split("=", 1) for part in shlex.split(line) if "=" in part) if "msg=" in line else {}
    except ValueError:
        return {}
    return found if "msg" in found else {}


def readable(line: str) -> str:
    """A key=value log line as words: its message and the fields that are not routine; other lines as they are."""
    fields = pairs(line)
    if not fields:
        return line.strip()
    message = fields.pop("msg", "")
    exception = fields.pop("exception", "").strip().rpartition("\n")[2]
    routine = ("time", "level", "process", "logger")
    rest = ", ".join(f"{k} {v}" for k, v in fields.items() if k not in routine)
    text = message + (f": {exception}" if exception else "") + (f" ({rest})" if rest else "")
    return text.strip()


def shortened(text: str) -> str:
    """At most LONGEST characters."""
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def telling_line(text: str) -> str:
    """The last line that explains an end: one that speaks of an error, else the last line at all."""
    lines = plain_lines(text)
    for line in reversed(lines[-40:]):
        words = readable(line)
        if _TELLING.search(line) and not _NOISE.match(line) and words:
            return shortened(words)
    return shortened(readable(lines[-1])) if lines else ""
