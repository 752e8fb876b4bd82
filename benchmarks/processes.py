"""What becomes of a run in several processes that is disturbed: `python -m benchmarks.processes`.

Trains the smallest model in two processes, and in four, of one device each. One of them is killed
(SIGKILL), frozen (SIGSTOP), hangs in a step, or is told to stop (SIGTERM): the last of two, the
first of four. Each time all start again with `--resume`, and at the end of the run they do so in
another number. What ends, with which message and after how many seconds, and how many steps are
lost, is written down, and losses are compared with those of a run that nobody disturbed. What does
not come to its end is a row that says so, and then the status is 1. Seconds depend on how busy the
machine is: nothing here says how fast the trainer is.
"""

import contextlib
import dataclasses
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks import columns, records
from benchmarks.soak import last_step
from benchmarks.trainer_processes import (
    Process,
    flags_of,
    free_address,
    last_checkpoint,
    log_of,
    losses,
    said,
    shortened,
    start,
)
from examples.trainer.system import exit_status

MESHES = {1: "fsdp=1", 2: "fsdp=2", 4: "data=2,fsdp=2"}
THEN = {2: 4, 4: 1}
"""In how many processes a run ends that began in so many."""
DISTURBED = {2: 1, 4: 0}
"""Which process: the last of two, and of four the first, on which the others rely in JAX."""
AT = 15
"""Steps from a start to its disturbance."""
EXACT = 1e-4
"""A larger difference of a loss is an error; losses are about 5."""
SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP, "SIGTERM": signal.SIGTERM}
HANGS = """
import sys, threading
from examples import train
from examples.trainer.runs import loop
place = loop.place_batch
def stuck_disk(loader, step, rows):
    return place(loader, step, rows) if step < {at} else threading.Event().wait()
loop.place_batch = stuck_disk
sys.exit(train.main(sys.argv[1:]))
"""
WANTED = {"killed": {1, -6}, "frozen": {1, -6}, "hung": {1, -6}, "SIGTERM": {143}}
"""Exit statuses of the processes that are left; -6 is JAX's, which aborts."""
Disturbance = Literal["killed", "frozen", "hung", "SIGTERM"]
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """What is tried, and how long it may take."""

    two: tuple[Disturbance, ...] = ("killed", "frozen", "hung", "SIGTERM")
    """What is done to the last of two processes, in this order."""
    four: tuple[Disturbance, ...] = ("killed", "SIGTERM")
    """What is done to the first of four, which is JAX's coordinator."""
    watchdog_minutes: float = 0.5
    """The trainer's flag where one hangs; the other runs have its default, 5 minutes."""
    patience: float = 300.0
    """Seconds after which a start, or an end, is not waited for any more."""
    minutes: float = 15.0
    """Time for all; then what runs is killed, and the rest is left out."""
    logs: Path | None = None
    """Folder, which must not exist, for runs and what processes print; None: a temporary one."""
    out: Path | None = None
    """Folder for the JSON file; nothing is written without it."""


def main(config: Config) -> None:
    """Does all runs and prints the table; ends with status 1 if a row has a problem."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(exit_status.of_signal(number)))
    begun, rows = time.monotonic(), []
    with contextlib.ExitStack() as stack:
        folder = config.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=config.logs is None)
        trial = Trial(config, folder, begun + 60 * config.minutes)
        for row in trial.rows():
            rows.append(row)
            print(row, file=sys.stderr, flush=True)  # a table comes at the end only
            asked = dataclasses.replace(config, logs=None)
            record = {
                **records.describe_run("benchmarks.processes", asked),
                "seconds": time.monotonic() - begun,
                "rows": rows,
            }
            records.write(config.out, "processes", record, said=False)
    print(columns.table(rows, COLUMNS, left=3))
    print(f"{time.monotonic() - begun:.0f} s")
    if any(row.get("problem") for row in rows):
        sys.exit(1)


@dataclasses.dataclass
class Trial:
    """Runs in a folder, until a moment of `time.monotonic`."""

    config: Config
    folder: Path
    deadline: float
    expected: dict[int, float] = dataclasses.field(default_factory=dict)
    """Step to loss, of the run that nobody disturbs."""

    def rows(self) -> Generator[Row]:
        """The undisturbed run, and those that are disturbed, whose losses are compared with it."""
        run = self.folder / "undisturbed"
        row = self.attempt(run, 2, "undisturbed")
        yield row
        if row["problem"]:
            return
        self.expected = losses(run)
        for count, disturbances in ((2, self.config.two), (4, self.config.four)):
            run = self.folder / f"begun-in-{count}"
            for what in disturbances:
                yield self.attempt(run, count, what)
            if disturbances:
                yield self.attempt(run, THEN[count], f"resumed from {count}")

    def attempt(self, run: Path, count: int, what: str) -> Row:
        """Starts a run, or the rest of it, disturbs it, and says what came of it."""
        row: Row = {"processes": count, "what": what, "from": last_checkpoint(run)}
        try:
            with self.started(run, count, what, row["from"] + AT) as group:
                row |= self.outcome(run, group, what, row["from"] + AT)
        except TimeoutError as error:
            row["problem"] = str(error)
        reached, found = last_step(run / "metrics.jsonl"), losses(run)
        row |= {"reached": reached, "lost": reached - last_checkpoint(run)}
        if self.expected and found:
            row["difference"] = max(abs(found[step] - self.expected[step]) for step in found)
            if row["difference"] > EXACT:
                row["problem"] = "other losses"
        return row

    def outcome(self, run: Path, group: list[Process], what: str, at: int) -> Row:
        """Disturbs a group after a step; what those say that can end, and when they have."""
        metrics, victim = run / "metrics.jsonl", DISTURBED.get(len(group), 0)
        if what in WANTED:
            self.wait(f"step {at}", group, lambda: last_step(metrics) >= at)
            self.wait("a checkpoint", group, lambda: last_checkpoint(run) > at - AT)
        begun = time.time()
        if what in SIGNALS:
            group[victim].send_signal(SIGNALS[what])
        alone = what in ("killed", "frozen")
        seen = {i: one for i, one in enumerate(group) if not alone or i != victim}
        for one in seen.values():
            self.wait("the end", [], lambda one=one: one.poll() is not None)
        # One that hangs has done so since the last step that was written.
        since = metrics.stat().st_mtime if what == "hung" else begun
        statuses = [one.returncode for one in seen.values()]
        return {
            "seconds": time.time() - since,
            "statuses": statuses,
            "said": said(log_of(run, what, i) for i in seen),
            "problem": "" if {*statuses} <= WANTED.get(what, {0}) else "wrong status",
        }

    def wait(self, what: str, group: list[Process], happened: Callable[[], bool]) -> None:
        """Waits for something during which none of a group may end."""
        end = min(time.monotonic() + self.config.patience, self.deadline)
        while not happened():
            if time.monotonic() > end or any(one.poll() is not None for one in group):
                statuses = [one.poll() for one in group]
                raise TimeoutError(f"{what} did not come; statuses {statuses}")
            time.sleep(0.01)

    @contextlib.contextmanager
    def started(self, run: Path, count: int, what: str, at: int) -> Generator[list[Process]]:
        """The processes of a run; none outlives the block."""
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"not begun within {self.config.minutes:g} minutes")
        flags = [*flags_of(run), "--mesh", MESHES[count]]
        if what == "hung":
            flags += ["--watchdog-minutes", str(self.config.watchdog_minutes)]
        if count > 1:
            flags += ["--coordinator", free_address(), "--num-processes", str(count)]
        group: list[Process] = []
        try:
            for i in range(count):
                hangs = what == "hung" and i == DISTURBED[count]
                last = at + (i == 0)  # the first writes a step when it has begun the next one
                program = ["-c", HANGS.format(at=last)] if hangs else ["-m", "examples.train"]
                own = ["--process-id", str(i)] if count > 1 else []
                group.append(start([*program, *flags, *own], log_of(run, what, i)))
            yield group
        finally:
            for process in group:
                process.kill()
                process.wait()


COLUMNS = (
    ("processes", lambda row: str(row["processes"])),
    columns.word("what happens", "what"),
    ("what the others say", lambda row: shortened(row.get("problem") or row["said"])),
    ("exit statuses", lambda row: ", ".join(map(str, sorted({*row.get("statuses", ())})))),
    columns.number("s until all ended", "seconds", 0),
    columns.number("last step", "reached", 0),
    columns.number("steps lost", "lost", 0),
    ("largest difference of a loss", lambda row: f"{row.get('difference', 0):.0e}"),
)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.processes", description=__doc__))
