"""The logs of local pods: the line that says why one ended, the line that says what it does. Pure but for tail()."""

import re
import shlex
from pathlib import Path

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TELLING = re.compile(r"error|exception|fatal|killed|cannot|could not|not found|no such|refused|to serve at", re.I)
_NOISE = re.compile(r"^(\s|Traceback|During handling|The above exception|\^|File \")")
LONGEST = 300


def tail(path: Path, size: int = 8192) -> str:
    """The end of a log file, "" where there is none yet."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def plain_lines(text: str) -> list[str]:
    """Lines without colours; of a line rewritten in place, what it ended as."""
    lines = [_ANSI.sub("", line).rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return [line for line in lines if line.strip()]


def _pairs(line: str) -> dict[str, str]:
    """The fields of a key=value log line; none where it is not one."""
    try:
        pairs = dict(part.split("=", 1) for part in shlex.split(line) if "=" in part) if "msg=" in line else {}
    except ValueError:
        return {}
    return pairs if "msg" in pairs else {}


def readable(line: str) -> str:
    """A key=value log line as words: its message and the fields that are not routine; other lines as they are."""
    pairs = _pairs(line)
    if not pairs:
        return line.strip()
    message = pairs.pop("msg", "")
    exception = pairs.pop("exception", "").strip().rpartition("\n")[2]
    routine = ("time", "level", "process", "logger")
    rest = ", ".join(f"{k} {v}" for k, v in pairs.items() if k not in routine)
    text = message + (f": {exception}" if exception else "") + (f" ({rest})" if rest else "")
    return text.strip()


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def telling_line(text: str) -> str:
    """The last line that explains an end: one that speaks of an error, else the last line at all."""
    lines = plain_lines(text)
    for line in reversed(lines[-40:]):
        words = readable(line)
        if _TELLING.search(line) and not _NOISE.match(line) and words:
            return _shortened(words)
    return _shortened(readable(lines[-1])) if lines else ""


def progress_line(text: str) -> str:
    """What a loading engine does, by its last line that says so; "" where none does."""
    for line in reversed(plain_lines(text)):
        pairs = _pairs(line)
        if not pairs:
            return _shortened(line.strip())
        if "phase" in pairs:
            return pairs["phase"] + (" done" if pairs["msg"].endswith("done") else "")
        if pairs["msg"] not in ("request", "starting"):
            return _shortened(pairs["msg"])
    return ""
