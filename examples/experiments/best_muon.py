"""Muon+ against the best Muon: `python -m examples.experiments.best_muon FOLDER`.

What is run and in which order is in `results/experiments/best_muon/hypotheses.md`. The same command
continues what was stopped, and several processes with it share the work.
"""

import itertools
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from examples.experiments.sweeps import command_line, results
from examples.experiments.sweeps.results import MUON, Sweep
from examples.experiments.sweeps.run import sweep
from examples.trainer.system import exit_status
from examples.trainer.system.files import write_atomically

FAMILIES = ("gpt", "llama")
SECOND_RATES = (0.01, 0.02, 0.03, 0.045)
SCHEDULES = {
    "cosine": ["warmup_cosine"],
    "linear": ["constant_linear", "--optimizer.hold-share", "0"],
    "hold-0.4": ["constant_linear", "--optimizer.hold-share", "0.4"],
    "hold-0.7": ["constant_linear", "--optimizer.hold-share", "0.7"],
}
RATES = (0.0035, 0.005, 0.007, 0.01, 0.014, 0.02, 0.028, 0.04, 0.056, 0.08)
ADAM_RATES = (0.00035, 0.0005, 0.0007, 0.001, 0.0014, 0.002, 0.0028, 0.004, 0.0056, 0.008)
NORMS = ("row_col", "col_row", "long", "row")
RIVALS = ("normuon", "aurora", "muoneq_max")
CLOSE = 0.03  # nats: farther from the lowest loss of the first look, a cell is left out
MOST = 4  # cells that are kept
CHOOSE, ALL = 3, 11  # seeds that choose a rate, and those with the eight that answer

Flags = list[str]


class Cell(NamedTuple):
    """What the matrices' rule and its rate are tried within."""

    family: str
    schedule: str
    second: float
    """Peak rate of embeddings and norms."""

    def sweep(self, shape: str) -> str:
        """The folder of its runs with a shape factor; rules with one of their own are in max.

        The first look has a folder of its own: a rate with fewer seeds would have no part in a
        choice by three.
        """
        return f"{self.family}-{self.schedule}-{self.second:g}-{shape}"


class Choice(NamedTuple):
    """The best Muon of a family."""

    cell: Cell
    shape: str
    method: str
    rate: float


def run(root: Path, cell: Cell, shape: str, start: float, seeds: int, methods: Flags) -> Sweep:
    """Does what is left of a sweep, and reads it; ends the program if it was stopped."""
    name, factor = cell.sweep(shape), shape.removesuffix("-look")
    asked = f"""{cell.family}-tiny --name {name} --runs-dir {root} --model.n-layer 2
      --model.n-head 2 --model.d-model 64 --model.context 64 --data.order numpy --eval-every 400
      --eval-batches 100000 --checkpoint-every 100000 --optimizer.shape-scale {factor}
      --optimizer.adam-learning-rate {cell.second} --grid.seeds {seeds}
      --grid.chosen-by {min(seeds, CHOOSE)} --grid.start {start}""".split()
    listed = ["--grid.rates", *map(str, RATES), "--grid.adam-rates", *map(str, ADAM_RATES)]
    schedule = ["--optimizer.schedule", *SCHEDULES[cell.schedule]]
    status = sweep(*command_line.parse([*asked, *listed, *schedule, *methods]))
    if status:
        raise SystemExit(status)
    shutil.rmtree(root / name / "runs", ignore_errors=True)  # checkpoints; the ledger has losses
    return results.read(root / name)


def only(*rules: str) -> Flags:
    """Flags of rules without options."""
    return ["--grid.optimizers", *rules]


def plus(*norms: str, frobenius: Sequence[str] = ("free",)) -> Flags:
    """Flags of Muon+."""
    return [*only("muonplus"), "--grid.norms", *norms, "--grid.frobenius", *frobenius]


def decided(root: Path, name: str, decide: Any) -> Any:
    """A decision by what was run so far, which stays as it was made first."""
    path = root / "decisions.json"
    made = json.loads(path.read_text()) if path.exists() else {}
    if name not in made:
        made[name] = decide()
        write_atomically(path, json.dumps(made, indent=1).encode())
        made = json.loads(path.read_text())
    return made[name]


def look(root: Path, family: str) -> dict[str, Any]:
    """Stage A1: Muon in all cells, by one seed; the cells that are kept, and all losses."""
    found = []
    for schedule, second in itertools.product(SCHEDULES, SECOND_RATES):
        cell = Cell(family, schedule, second)
        done = run(root, cell, "max-look", 0.02, 1, only("muon"))
        rate = done.best_rate(MUON)
        found.append((done.losses(MUON, rate)[0], *cell, rate))
    found.sort()
    kept = [entry for entry in found if entry[0] <= found[0][0] + CLOSE][:MOST]
    return {"kept": kept, "all": found}


def best_muon(root: Path, family: str, kept: list[list[Any]]) -> list[Any]:
    """Stage A2: the kept cells with all three of Muon's updates, by three seeds; the best one."""
    found = []
    for _, *names, rate in kept:
        cell = Cell(*names)
        for shape, rules in (("max", only("muon", "optax_muon")), ("spectral", only("muon"))):
            done = run(root, cell, shape, rate, CHOOSE, rules)
            for method in done.methods():
                best, losses = done.best_rate(method), done.best(method)
                mean = sum(losses[seed] for seed in range(CHOOSE)) / CHOOSE
                found.append((mean, *cell, shape, method.name, best))
    return list(min(found))


def neighbours(cell: Cell, looked: list[list[Any]]) -> list[Cell]:
    """The cells one step from a cell: second rates beside it, and the next best schedule."""
    place = SECOND_RATES.index(cell.second)
    beside = [SECOND_RATES[i] for i in (place - 1, place + 1) if 0 <= i < len(SECOND_RATES)]
    others = [
        (loss, schedule)
        for loss, _, schedule, second, _ in looked
        if second == cell.second and schedule != cell.schedule
    ]
    return [
        *(cell._replace(second=second) for second in beside),
        cell._replace(schedule=min(others)[1]),
    ]


def primary(root: Path, cell: Cell, rate: float) -> None:
    """What every cell of stage B has: Muon, row_col, the default, and the best rival."""
    start = run(root, cell, "max", rate, ALL, only("muon")).best_rate(MUON)
    run(root, cell, "max", start, ALL, plus("row_col"))
    run(root, cell, "spectral", start, ALL, plus("col_row"))
    run(root, cell, "max", start, ALL, only("normuon"))


def rest(root: Path, cell: Cell) -> None:
    """What only the best cell has: all norms, free and matched, and all rivals."""
    start = results.read(root / cell.sweep("max")).best_rate(MUON)
    run(root, cell, "spectral", start, ALL, only("muon"))
    for shape in ("max", "spectral"):
        run(root, cell, shape, start, ALL, plus(*NORMS, frobenius=("free", "matched")))
    run(root, cell, "max", start, ALL, only("optax_muon", *RIVALS))


def adamw(root: Path, cell: Cell) -> list[Any]:
    """AdamW with both rates tuned: by three seeds, then eight at the best second rate."""
    found = []
    for second in SECOND_RATES:
        done = run(root, cell._replace(second=second), "max", 0.002, CHOOSE, only("adamw"))
        losses = done.best(results.ADAMW)
        found.append((sum(losses[seed] for seed in range(CHOOSE)) / CHOOSE, second))
    best = min(found)[1]
    run(root, cell._replace(second=best), "max", 0.002, ALL, only("adamw"))
    return [best]


def contrast(
    name: str, first: tuple[str, str], second: tuple[str, str], refuted_if: str = ""
) -> dict[str, Any]:
    """A line of the table of tests: the loss of one (sweep, method) less that of another."""
    terms = [[1, *first], [-1, *second]]
    return {"name": name, "terms": terms, "refuted_if": refuted_if, "fresh": True}


def contrasts(
    best: Choice, beside: list[Cell], adamw_second: float | None
) -> Iterator[dict[str, Any]]:
    """One family's lines of the one table of tests; fixed by the choice of the cell alone."""
    cell, muon = best.cell, (best.cell.sweep("max"), "Muon")
    yield contrast(
        f"{cell.family}: Muon+ row_col max - Muon max",
        (cell.sweep("max"), "Muon+ row_col"),
        muon,
        "above -0.01",
    )
    for shape, norm, end in itertools.product(("max", "spectral"), NORMS, ("", " matched norm")):
        if (shape, norm, end) != ("max", "row_col", ""):
            name = f"Muon+ {norm}{end}"
            title = f"{cell.family}: {name} {shape} - Muon max"
            yield contrast(title, (cell.sweep(shape), name), muon)
    for name in ("Optax Muon", "NorMuon", "Aurora", "MuonEq max"):
        yield contrast(f"{cell.family}: {name} - Muon max", (muon[0], name), muon)
    yield contrast(
        f"{cell.family}: Muon spectral - Muon max", (cell.sweep("spectral"), "Muon"), muon
    )
    if adamw_second is not None:
        place = cell._replace(second=adamw_second).sweep("max")
        yield contrast(f"{cell.family}: AdamW - Muon max", (place, "AdamW"), muon)
    for other in beside:
        where, base = f"{cell.family} {other.schedule} {other.second:g}", other.sweep("max")
        for name, shape in (
            ("Muon+ row_col", "max"),
            ("Muon+ col_row", "spectral"),
            ("NorMuon", "max"),
        ):
            title = f"{where}: {name} {shape} - Muon max"
            yield contrast(title, (other.sweep(shape), name), (base, "Muon"))


def main(root: Path) -> int:
    """Does all stages; returns the exit status."""
    root.mkdir(parents=True, exist_ok=True)
    looks = {f: decided(root, f"{f}: look", lambda f=f: look(root, f)) for f in FAMILIES}
    chosen = {}
    for family, found in looks.items():
        entry = decided(
            root, f"{family}: best Muon", lambda f=family, k=found["kept"]: best_muon(root, f, k)
        )
        chosen[family] = Choice(Cell(*entry[1:4]), *entry[4:])
    beside = {f: neighbours(best.cell, looks[f]["all"]) for f, best in chosen.items()}
    second: dict[str, float | None] = dict.fromkeys(FAMILIES)
    write_contrasts(root, chosen, beside, second)
    for best in chosen.values():
        primary(root, best.cell, best.rate)
    for family, best in chosen.items():
        for cell in beside[family]:
            primary(root, cell, best.rate)
    for best in chosen.values():
        rest(root, best.cell)
    for family, best in chosen.items():
        cell = best.cell
        second[family] = decided(root, f"{family}: AdamW", lambda c=cell: adamw(root, c))[0]
    write_contrasts(root, chosen, beside, second)
    return 0


def write_contrasts(
    root: Path,
    chosen: dict[str, Choice],
    beside: dict[str, list[Cell]],
    second: dict[str, float | None],
) -> None:
    """Writes the table of tests, of both families."""
    lines = [
        line
        for family, best in chosen.items()
        for line in contrasts(best, beside[family], second[family])
    ]
    write_atomically(root / "contrasts.json", json.dumps(lines, indent=1).encode())


if __name__ == "__main__":
    exit_status.leave(exit_status.run_command(lambda: main(Path(sys.argv[1]))))
