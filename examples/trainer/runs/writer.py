"""One run folder has one writer: a lock that ends with the process that holds it."""

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO

from examples.trainer.runs import processes
from examples.trainer.system.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = "lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def only_writer(folder: Path, say: Callable[[str], None]) -> Generator[None]:
    """Holds the lock of a run folder; raises `UserError`, which names its holder, if it is taken.

    Of several processes that train together process 0 holds it for all. The kernel releases it
    when the process ends, in whatever way; the file stays, and means nothing by itself.
    """
    file = processes.together(lambda: take(folder, say) if processes.is_first() else None)
    try:
        yield
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def take(folder: Path, say: Callable[[str], None]) -> IO[str]:
    """The locked file, which names this process."""
    file = (folder / LOCK).open("a+")
    try:
        lock(file, folder, say)
    except BaseException:
        file.close()
        raise
    with contextlib.suppress(OSError):  # on a full disk the lock holds, but cannot say whose it is
        file.truncate(0)
        file.write(f"process {os.getpid()} on host {socket.gethostname()}\n")
        file.flush()
    return file


def lock(file: IO[str], folder: Path, say: Callable[[str], None]) -> None:
    """Locks a file without waiting."""
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, "no locks")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(200).strip() or "another process"
        raise UserError(
            f"{folder} is being written by {holder}, and a run has one writer: wait until that "
            "process ends, or stop it. Its lock ends with it, so that nothing is to be removed."
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        say(
            f"{folder} is on a file system without locks, so that two processes could write to "
            "it: see to it that only this one does."
        )
