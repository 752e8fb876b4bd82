"""`--profile FROM:TO`: a trace of some steps, as the profiler of JAX records it."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from examples.trainer.runs.processes import is_first

FOLDER = "profile"


@dataclass
class Profile:
    """Starts the trace before its first step and ends it after its last; process 0 records."""

    steps: range | None
    folder: Path
    say: Callable[[str], None]
    running: bool = False

    def before(self, step: int, waiting: Any) -> None:
        """Called before a step begins; `waiting` are results of the step before it."""
        if self.steps is None or step != self.steps[0] or not is_first():
            return
        jax.block_until_ready(waiting)  # else the trace would begin within that step
        jax.profiler.start_trace(self.folder / FOLDER)
        self.running = True

    def ends(self, step: int) -> bool:
        return self.running and self.steps is not None and step == self.steps[-1]

    def stop(self) -> None:
        """Writes the trace if one is running; the results of its steps must be there."""
        if not self.running:
            return
        self.running = False
        jax.profiler.stop_trace()
        where = shlex.quote(str(self.folder / FOLDER))
        self.say(
            f"trace written to {where}; to see it:\n"
            f"  pip install xprof && xprof --port 8791 {where}   # then http://localhost:8791\n"
            "or open the .trace.json.gz that is in it at https://ui.perfetto.dev"
        )
