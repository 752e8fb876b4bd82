"""Fails if a page of a built site loads a file of another host.

Usage: ``python docs/ext/no_other_hosts.py FOLDER``.
"""

import pathlib
import re
import sys

# Addresses that a browser loads by itself; links that a reader follows may lead anywhere.
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\bsrc=["']((?:https?:)?//[^"']+)"""
    r"""|<link\b(?=[^>]*\brel=["'](?:stylesheet|preload|preconnect|icon|shortcut icon)["'])"""
    r"""[^>]*?\bhref=["']((?:https?:)?//[^"']+)""",
    re.I,
)
IMPORTED = re.compile(r"""url\(["']?((?:https?:)?//[^"')]+)|@import ["']((?:https?:)?//[^"']+)""")


def loaded(folder: pathlib.Path) -> list[str]:
    """``page: address`` for each file of another host."""
    found = []
    for path in sorted(folder.rglob("*")):
        pattern = {".html": LOADED, ".css": IMPORTED}.get(path.suffix)
        if pattern:
            for groups in pattern.findall(path.read_text(encoding="utf-8")):
                found.append(f"{path.relative_to(folder)}: {next(filter(None, groups))}")
    return found


if __name__ == "__main__":
    if others := loaded(pathlib.Path(sys.argv[1])):
        sys.exit("These pages load files of other hosts:\n" + "\n".join(others))
    print("No page loads a file of another host.")
