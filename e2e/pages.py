"""Pages of the documentation as programs: their blocks of commands, run as they stand there.

A block that begins with `$ ` shows a command and what it says: the command is run, and every word of the first line of
what is shown has to come, `...` aside.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import kit

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block. `language` is empty for commands."""

    page: str
    line: int
    language: str
    text: str

    @property
    def shown(self) -> bool:
        """A command with what it says, not one to be copied."""
        return self.text.startswith("$ ")

    @property
    def command(self) -> str:
        """What a shell is given."""
        return self.text.splitlines()[0].removeprefix("$ ") if self.shown else self.text

    @property
    def expected(self) -> list[str]:
        """Words that the command of a shown block has to say."""
        lines = self.text.splitlines()
        return [word for word in lines[1].split() if word != "..."] if self.shown and len(lines) > 1 else []


def blocks(file: Path) -> list[Block]:
    """All of a page, in order."""
    text = file.read_text()
    return [
        Block(file.name, text[: match.start()].count("\n") + 1, match[1], match[2]) for match in FENCE.finditer(text)
    ]


def run_page(file: Path, folder: Path) -> dict[int, str]:
    """Runs the commands of a page in `folder`, a shell for each block that ends with its first command that fails.
    Returns what each said, by line. Raises AssertionError with the block that failed."""
    said: dict[int, str] = {}
    for block in blocks(file):
        if not block.language:
            said[block.line] = run_block(block, folder)
    return said


def run_block(block: Block, folder: Path, timeout: float = 600) -> str:
    """What it said; raises AssertionError where it failed or did not say what the page shows."""
    command = ["bash", "-euo", "pipefail", "-c", block.command]
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
    )
    text, where = done.stdout + done.stderr, f"{block.page}, line {block.line}: {block.command}"
    if block.shown:
        missing = [word for word in block.expected if word not in text]
        assert not missing, f"{where}\nsaid nothing of {missing}:\n{text}"
    else:
        assert done.returncode == 0, f"{where}\nexit {done.returncode}\n{text}"
    return text


def workspace(folder: Path) -> Path:
    """A folder as a clone of the repository is, in which commands may leave files behind."""
    for name in ("charts", "examples", "config", "crds"):
        (folder / name).symlink_to(kit.ROOT / name)
    return folder
