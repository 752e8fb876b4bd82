"""One run folder has one writer: a lock that ends with the process that holds it."""

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Generator
from pathlib import Path

from filelock import FileLock, Timeout

from examples.trainer.runs import processes
from examples.trainer.system import files
from examples.trainer.system.errors import UserError

LOCK = "lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def only_writer(folder: Path, say: Callable[[str], None]) -> Generator[None]:
    """Holds the lock of a run folder; raises `UserError`, which names its holder, if it is taken.

    Of several processes that train together process 0 holds it for all. The kernel releases it
    when the process ends, in whatever way; the file stays, and means nothing by itself.
    """
    lock = FileLock(folder / LOCK)
    processes.together(lambda: take(lock, folder, say) if processes.is_first() else None)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.release()


def take(lock: FileLock, folder: Path, say: Callable[[str], None]) -> None:
    """Locks without waiting, and writes into the file that this process does."""
    path = folder / LOCK
    files.check_inside(folder)
    holder = path.read_text()[:200].strip() if path.exists() else ""
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise UserError(
            f"{folder} is being written by {holder or 'another process'}, and a run has one "
            "writer: wait until that process ends, or stop it. Its lock ends with it, so that "
            "nothing is to be removed."
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        say(
            f"{folder} is on a file system without locks, so that two processes could write to "
            "it: make sure that no other process does."
        )
    with contextlib.suppress(OSError):  # on a full disk the lock holds, but cannot say whose it is
        path.write_text(f"process {os.getpid()} on host {socket.gethostname()}\n")
