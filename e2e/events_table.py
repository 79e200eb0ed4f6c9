"""Writes the tables of docs/operations.md from benchmarks/results/events.jsonl: the last row read of each event.

python e2e/events_table.py [--check]
"""

import json
import sys
from pathlib import Path

from streams import Verdict, table

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks/results/events.jsonl", ROOT / "docs/operations.md"
BEGIN = "<!-- {}: written by e2e/events_table.py from benchmarks/results/events.jsonl -->\n"
END = "<!-- /{} -->"


def latest(lines: list[str], *, computed: bool = False) -> list[Verdict]:
    """The last verdict on each event of full runs, soaks too, in the order of their first: on the simulated device, or
    of models that are `computed`, whose name then stands before the event."""
    found: dict[str, Verdict] = {}
    for line in lines:
        row = json.loads(line)
        if row.get("full") and bool(row.get("model")) == computed:
            values = {name: row[name] for name in Verdict.__dataclass_fields__}
            if computed:
                values["event"] = f"{row['model'].rpartition('/')[2]}: {row['event']}"
            found[values["event"]] = Verdict(**values)
    return list(found.values())


def page(text: str, lines: list[str]) -> str:
    """The page with the tables in it, each between its two comments."""
    for name, computed in (("events", False), ("computed", True)):
        begin, end = BEGIN.format(name), END.format(name)
        head, there, rest = text.partition(begin)
        if there:
            text = f"{head}{begin}{table(latest(lines, computed=computed))}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> int:
    fresh = page(PAGE.read_text(), RESULTS.read_text().splitlines())
    if "--check" in sys.argv:
        return 0 if fresh == PAGE.read_text() else 1
    PAGE.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
