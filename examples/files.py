"""Files that are either whole or not there."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file in one step, so that a crash leaves the old one or the new one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
