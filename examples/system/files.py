"""Writing a file so that it is never left half written."""

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file in one step: after a crash there is either the old file or the new one."""
    # A random name, not the process id: processes on other hosts may share the folder and the id.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
