"""How the commands word things: ages, counts, lists of names, kubectl's columns. Pure, standard library only."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime


def moment(text: str) -> datetime:
    """A time as the API server writes it (RFC 3339). Raises ValueError."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(UTC)


def seconds_since(since: str, now: datetime | None = None) -> int:
    """Whole seconds from a time in RFC 3339 until now; 0 for times to come."""
    return max(0, int(((now or datetime.now(UTC)) - moment(since)).total_seconds()))


def age(since: str, now: datetime | None = None) -> str:
    """kubectl's short ages: 42s, 5m10s, 3h4m, 2d."""
    return duration(seconds_since(since, now))


def duration(seconds: int) -> str:
    """A length of time as kubectl shortens it."""
    if seconds < 120:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60}s" if seconds < 600 else f"{seconds // 60}m"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60}m"
    return f"{seconds // 86400}d"


def count(number: int, noun: str) -> str:
    """1 replica, 2 replicas."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def names(found: Iterable[str], most: int = 4) -> str:
    """a, b, c, d and 3 more."""
    listed = sorted(found)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def sentence(text: str) -> str:
    """With a capital letter's place left alone (names stay as they are) and a full stop at its end."""
    text = " ".join(text.split())
    return text if not text or text[-1] in '.!?:"' else text + "."


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows as kubectl aligns them."""
    listed = [list(map(str, row)) for row in rows]
    widths = [max(len(row[i]) for row in listed) for i in range(len(listed[0]))]
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in listed]
