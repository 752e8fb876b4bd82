"""Writes the pictures of README.md."""

import pathlib

from docs.drawings import DRAWINGS

FOLDER = pathlib.Path(__file__).parent.parent / "_static"

if __name__ == "__main__":
    for name in ("chain", "shakespeare"):
        path = FOLDER / f"{name}.svg"
        path.write_text(DRAWINGS[name]().svg() + "\n", encoding="utf-8")
        print(f"{path}: {path.stat().st_size} bytes")
