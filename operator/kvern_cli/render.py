"""Blocks of text on a terminal (colours, wrapped at its width) and elsewhere (plain lines, nothing cut).

What is shown is built by pure functions as a list of blocks. rich is imported for terminals only: it takes longer than
all else.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TextIO

from kvern_cli.words import table

if TYPE_CHECKING:
    from rich.console import Group

Style = Literal["", "good", "bad", "busy", "dim", "strong"]
COLOURS = {"": "", "good": "green", "bad": "red", "busy": "yellow", "dim": "dim", "strong": "bold"}


@dataclass(frozen=True)
class Cell:
    """A text with what it means for people."""

    text: str
    style: Style = ""


@dataclass(frozen=True)
class Table:
    """Rows under a header; `title` stands above it."""

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""


@dataclass(frozen=True)
class Pairs:
    """Labels, each with one or more lines."""

    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


@dataclass(frozen=True)
class Line:
    """A line of its own."""

    cell: Cell


Block = Table | Pairs | Line


def plain(blocks: Sequence[Block]) -> list[str]:
    """As lines, with an empty one between blocks."""
    out: list[str] = []
    for block in blocks:
        if out:
            out.append("")
        if isinstance(block, Line):
            out.append(block.cell.text)
        elif isinstance(block, Pairs):
            width = max((len(label) for label, _ in block.rows), default=0) + 3
            for label, cells in block.rows:
                for i, cell in enumerate(cells):
                    out.append((label if i == 0 else "").ljust(width) + cell.text)
        else:
            lines = table([block.header, *(tuple(cell.text for cell in row) for row in block.rows)])
            out += [f"{block.title}:", *(f"  {line}" for line in lines)] if block.title else lines
    return out


def show(blocks: Sequence[Block], stream: TextIO | None = None) -> None:
    """Print the blocks."""
    stream = stream or sys.stdout
    if stream.isatty():
        from rich.console import Console

        Console(file=stream, highlight=False).print(fancy(blocks))
    else:
        print("\n".join(plain(blocks)), file=stream, flush=True)


def fancy(blocks: Sequence[Block]) -> "Group":
    """As something that rich prints."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table as RichTable
    from rich.text import Text

    parts: list[object] = []
    for block in blocks:
        if parts:
            parts.append(Text(""))
        if isinstance(block, Line):
            parts.append(Text(block.cell.text, COLOURS[block.cell.style]))
        elif isinstance(block, Pairs):
            grid = RichTable.grid(padding=(0, 3, 0, 0))
            grid.add_column(style="bold", no_wrap=True)
            grid.add_column(overflow="fold")
            for label, cells in block.rows:
                for i, cell in enumerate(cells):
                    grid.add_row(label if i == 0 else "", Text(cell.text, COLOURS[cell.style]))
            parts.append(grid)
        else:
            grid = RichTable(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
            for i, name in enumerate(block.header):
                grid.add_column(name, no_wrap=i + 1 < len(block.header), overflow="fold")
            for row in block.rows:
                grid.add_row(*(Text(cell.text, COLOURS[cell.style]) for cell in row))
            if block.title:
                parts.append(Text(block.title, "bold"))
                parts.append(Padding(grid, (0, 0, 0, 2)))
            else:
                parts.append(grid)
    return Group(*parts)  # type: ignore[arg-type]
