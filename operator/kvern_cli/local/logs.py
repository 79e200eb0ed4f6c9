"""The logs of local pods: the end of a file, and the line in it that says what a loading engine does."""

from pathlib import Path

from kvern_operator.loglines import LONGEST, pairs, plain_lines, shortened, telling_line

__all__ = ["LONGEST", "plain_lines", "progress_line", "tail", "telling_line"]


def tail(path: Path, size: int = 8192) -> str:
    """The end of a log file, "" where there is none yet."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def progress_line(text: str) -> str:
    """What a loading engine does, by its last line that says so; "" where none does."""
    for line in reversed(plain_lines(text)):
        fields = pairs(line)
        if not fields:
            return shortened(line.strip())
        if "phase" in fields:
            return fields["phase"] + (" done" if fields["msg"].endswith("done") else "")
        if fields["msg"] not in ("request", "starting"):
            return shortened(fields["msg"])
    return ""
