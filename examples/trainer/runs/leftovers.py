"""What TensorStore prints after an error that was already reported."""

import sys


class Leftovers:
    """A context that drops complaints of reads and writes that outlive the first that failed.

    Orbax ends its event loop at the first error. The others then have no loop to report to, and
    each would print a traceback, `Event loop is closed`, below the message that says what is wrong.
    After an error this stays so, as they may end at any later time.
    """

    def __enter__(self) -> "Leftovers":
        self.before = sys.unraisablehook
        sys.unraisablehook = self.hook
        return self

    def hook(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Passes on whatever is something else."""
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            self.before(unraisable)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None and sys.unraisablehook == self.hook:
            sys.unraisablehook = self.before
