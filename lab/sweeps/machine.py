"""What ran: the commit of the code and the processor, as each line of a ledger has them."""

import functools
import platform
import subprocess
from pathlib import Path


@functools.cache
def commit() -> str:
    """The commit of this checkout, with a plus if files differ from it; empty outside of one."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # no git here
        return ""
    return found.stdout.strip()


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
