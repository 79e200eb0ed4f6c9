"""Prints the manifest of kind's default storage: the text stands as a constant in kind's Go source, with the names of
its images spliced in. Usage: storage_manifest.py const_storage.go"""

import re
import sys
from pathlib import Path

START = "const defaultStorageManifest = `"


def manifest(source: str) -> str:
    """The manifest in a Go source file; raises ValueError where it is not there as expected."""
    names = dict(re.findall(r'const (\w+) = "([^"]+)"', source))
    if START not in source:
        raise ValueError(f"no {START!r} in the given file: kind has moved its storage manifest")
    text = source[source.index(START) + len(START) :]
    text = re.sub(r"` \+ (\w+) \+ `", lambda found: names[found.group(1)], text)
    return text[: text.index("`")].lstrip()


if __name__ == "__main__":
    sys.stdout.write(manifest(Path(sys.argv[1]).read_text()))
