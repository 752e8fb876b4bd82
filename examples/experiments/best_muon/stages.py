"""The stages of the runs: each decides what the next one leaves out.

They are described in `results/experiments/best_muon/hypotheses.md`. What was stopped goes on, and
several processes with the same command share the work.
"""

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from examples.experiments.best_muon.plan import (
    ADAM_RATES,
    ALL,
    CHOOSE,
    CLOSE,
    FAMILIES,
    MOST,
    NORMS,
    RATES,
    RIVALS,
    SCHEDULES,
    SECOND_RATES,
    Cell,
    Choice,
    contrasts,
    neighbours,
)
from examples.experiments.sweeps import command_line, results
from examples.experiments.sweeps.results import MUON, Sweep
from examples.experiments.sweeps.run import finish
from examples.trainer.system.files import write_atomically

Flags = list[str]


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
    status = finish(*command_line.parse([*asked, *listed, *schedule, *methods]))
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


def decided(root: Path, name: str, decide: Callable[[], Any]) -> Any:
    """A decision by what was run so far, which stays as it was made first."""
    path = root / "decisions.json"
    if name not in decisions(path):
        decision = decide()  # which may take hours, in which other processes decide too
        made = {name: decision} | decisions(path)
        write_atomically(path, json.dumps(made, indent=1).encode())
    return decisions(path)[name]


def decisions(path: Path) -> dict[str, Any]:
    """What was decided so far."""
    return json.loads(path.read_text()) if path.exists() else {}


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
