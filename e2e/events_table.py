"""Writes the table of docs/operations.md from benchmarks/results/events.jsonl: the last row read of each event.

python e2e/events_table.py [--check]
"""

import json
import sys
from pathlib import Path

from streams import Verdict, table

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks/results/events.jsonl", ROOT / "docs/operations.md"
BEGIN, END = (
    "<!-- events: written by e2e/events_table.py from benchmarks/results/events.jsonl -->\n",
    "<!-- /events -->",
)


def latest(lines: list[str]) -> list[Verdict]:
    """The last verdict on each event, those of full runs on the simulated device, in the order of their first."""
    found: dict[str, Verdict] = {}
    for line in lines:
        row = json.loads(line)
        if row.pop("full", False) and not (row.get("soak") or row.get("model")):
            found[row["event"]] = Verdict(**{name: row[name] for name in Verdict.__dataclass_fields__})
    return list(found.values())


def page(text: str, lines: list[str]) -> str:
    """The page with the table in it."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}{table(latest(lines))}\n{END}{tail}"


def main() -> int:
    fresh = page(PAGE.read_text(), RESULTS.read_text().splitlines())
    if "--check" in sys.argv:
        return 0 if fresh == PAGE.read_text() else 1
    PAGE.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
