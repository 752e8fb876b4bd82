"""Regular expressions that a user, or a file, gives to choose among names."""

import contextlib
import difflib
import re
import signal
import threading
from collections.abc import Generator, Sequence
from types import FrameType

from examples.trainer.system.errors import UserError

SECONDS = 5.0  # for what takes less than a thousandth


@contextlib.contextmanager
def limited() -> Generator[None]:
    """Raises `TimeoutError` in what takes too long; the matching of Python looks at signals."""
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def search(pattern: str, names: Sequence[str], flag: str, kind: str) -> list[str]:
    """The names in which the pattern is found; raises `UserError` if there is none."""
    try:
        with limited():
            found = [name for name in names if re.search(pattern, name)]
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"{flag} {pattern}: this is no regular expression: {error}.") from None
    except TimeoutError:
        raise UserError(
            f"{flag} {pattern}: to search this takes for ever: give one without a repetition in a"
            " repetition."
        ) from None
    if not found:
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
        raise UserError(
            f"{flag} {pattern} finds no {kind}: give a regular expression for names such as"
            f" {', '.join(near)}."
        )
    return found
