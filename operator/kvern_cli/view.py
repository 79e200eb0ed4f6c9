"""What `kvern up` shows: a small live table on a terminal, elsewhere a line a change. Decides nothing."""

import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

REMIND = 5.0  # seconds after which a plain line is repeated while a pod is still busy


@dataclass(frozen=True)
class Row:
    """One pod. `state`: ready | busy | trouble."""

    name: str
    text: str
    seconds: float
    state: str


class PlainView:
    """A line a change, with the seconds since the start. Changes of a percentage alone are not shown."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._start = time.monotonic()
        self._shown: dict[str, tuple[str, float]] = {}

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Somebody else prints."""
        yield

    def update(self, rows: Sequence[Row]) -> None:
        """Show the present state of the pods."""
        for row in rows:
            key, now = re.sub(r"\d+(\.\d+)? ?%|\d+ in flight", "", row.text), time.monotonic()
            shown, at = self._shown.get(row.name, ("", 0.0))
            waiting = row.state == "busy" and now - at > REMIND
            if shown != key or waiting:
                self._shown[row.name] = (key, now)
                self.say(f"{row.name}: {row.text}" + (f" ({row.seconds:.0f} s)" if waiting and shown == key else ""))
        for gone in self._shown.keys() - {row.name for row in rows}:
            del self._shown[gone]
            self.say(f"{gone}: stopped")

    def say(self, text: str) -> None:
        """A line that stays."""
        print(f"[{time.monotonic() - self._start:6.1f} s] {text}", file=self._stream, flush=True)


class RichView:
    """A live table, a row a pod, with what it does and for how long; lines that stay go above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True, highlight=False)
        # What others print goes where it should: they pause the table (`paused`) instead of printing through it.
        self._live = Live(
            console=self._console,
            refresh_per_second=10,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._spinners: dict[str, Any] = {}

    def __enter__(self) -> "RichView":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The table is gone while somebody else prints."""
        self._live.stop()
        try:
            yield
        finally:
            self._live.start()

    def update(self, rows: Sequence[Row]) -> None:
        """Show the present state of the pods."""
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1))
        table.add_column(width=1)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True, style="dim")
        table.add_column(no_wrap=True, overflow="ellipsis")
        signs = {"ready": Text("✓", "green"), "trouble": Text("✗", "red")}
        for row in rows:
            sign = signs.get(row.state) or self._spinners.setdefault(row.name, Spinner("dots", style="cyan"))
            style = {"ready": "green", "trouble": "red"}.get(row.state, "")
            table.add_row(sign, row.name, f"{row.seconds:.1f} s", Text(row.text, style))
        self._live.update(table)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)


View = PlainView | RichView


def make_view() -> View:
    """Rich where standard error is a terminal, plain elsewhere."""
    return RichView() if sys.stderr.isatty() else PlainView()
