#!/usr/bin/env python3
"""Where the operator's processor time went: shares by function, from the files that run.py --profile writes.

    stacks.py FILE [--top N] [--under FUNCTION]

`all` counts a function wherever it is on the stack, `self` where it is the innermost; both in per cent of the samples,
or of those under a function whose name holds FUNCTION.
"""

import argparse
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

EVERY = 0.005  # seconds of processor time a sample (see profiled.py)


def shares(lines: Iterable[str], under: str = "") -> tuple[int, Counter[str], Counter[str]]:
    """(samples, samples a function is in, samples it ends in) of collapsed stacks."""
    total, inside, ends = 0, Counter[str](), Counter[str]()
    for line in lines:
        text, _, number = line.rpartition(" ")
        stack = text.split(";")
        if under:
            place = next((i for i, name in enumerate(stack) if under in name), None)
            if place is None:
                continue
            stack = stack[place:]
        total += int(number)
        ends[stack[-1]] += int(number)
        for name in set(stack):
            inside[name] += int(number)
    return total, inside, ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--top", type=int, default=30, metavar="N")
    parser.add_argument("--under", default="", metavar="FUNCTION")
    given = parser.parse_args()
    total, inside, ends = shares(given.file.read_text().splitlines(), given.under)
    print(f"{total} samples, {total * EVERY:.1f} s of processor time")
    for name, number in inside.most_common(given.top):
        print(f"{number / total:7.1%} {ends[name] / total:7.1%}  {name}")


if __name__ == "__main__":
    main()
