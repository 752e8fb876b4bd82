"""Files that are either whole or not there."""

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file in one step, so that a crash leaves the old one or the new one."""
    # Not the process id: processes on other hosts, which see the same folder, can have the same.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
