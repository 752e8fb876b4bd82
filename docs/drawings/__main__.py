"""Writes the picture of README.md."""

import pathlib

from docs.drawings import DRAWINGS

PATH = pathlib.Path(__file__).parent.parent / "_static" / "chain.svg"

if __name__ == "__main__":
    PATH.write_text(DRAWINGS["chain"]().svg() + "\n", encoding="utf-8")
    print(f"{PATH}: {PATH.stat().st_size} bytes")
