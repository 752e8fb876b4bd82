"""Draws the paper's figures of imbalance from a recorded sweep, and writes their numbers."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro

from examples.experiments.paper import claims, imbalance, records
from examples.experiments.paper import curvature as along_updates
from examples.experiments.paper import imbalance_figures as drawn
from examples.experiments.sweeps import figures as sweep_figures
from examples.experiments.sweeps import results
from examples.experiments.sweeps.results import MUON
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.runs.compilation import keep_compiled_programs
from examples.trainer.system.errors import UserError


def draw(
    recorded: Annotated[Path, tyro.conf.Positional],
    out: Path,
    sweeps: tuple[Path, ...] = (),
    step: int | None = None,
    kind: str = "up",
    layer: int = 2,
    curvature: bool = True,
) -> Path:
    """Draws the paper's figures of imbalance, with the numbers of each figure.

    Args:
      recorded: folder of a sweep whose runs recorded their matrices, with runs of Muon and Muon+.
      out: where to write.
      sweeps: folders of sweeps over learning rates, for the claims about large rates.
      step: checkpoint that the momenta are read from; the last by default.
      kind: kind of the matrix that is drawn entry by entry.
      layer: layer of that matrix, and of the matrices whose curvature is measured.
      curvature: measure the loss's curvature along updates, which takes minutes.
    """
    keep_compiled_programs()
    methods = records.read(recorded)
    muon, _ = (records.of(method, methods) for method in (MUON, claims.PLUS))
    step, momenta = records.momenta(muon, step)
    iterations = imbalance.by_iterations(momenta)
    training = imbalance.during_training(methods)
    ranks = imbalance.rank_correlations(muon)
    save(out, "iterations", iterations, drawn.plot_iterations)
    save(out, "training", training, drawn.plot_training)
    save(out, "ranks", ranks, drawn.plot_rank_correlations)
    save(out, "regions", imbalance.regions(), drawn.plot_regions)
    title = f"{kind} of layer {layer}, step {step} of {recorded.name}"
    plot_entries = functools.partial(drawn.plot_entries, title=title)
    save(out, "entries", imbalance.entries(momenta, kind, layer), plot_entries)
    bounds = None
    if curvature:
        bounds = along_updates.compare(CheckpointRef(muon.folder, step), layer)
        write(out / "curvature.json", bounds)
    compared = [results.read(folder) for folder in sweeps]
    if compared:
        curves = {sweep.name: sweep_figures.training_curves(sweep) for sweep in compared}
        write(out / "stability.json", curves)
        sweep_figures.plot_stability(compared, out / "stability.png")
    path = out / "claims.md"
    path.write_text(claims.table(iterations, training, ranks, bounds, compared) + "\n")
    return path


def save(out: Path, name: str, data: Any, plot: Callable[..., None]) -> None:
    """Writes the numbers of a figure and draws it."""
    write(out / f"{name}.json", data)
    plot(data, path=out / f"{name}.png")


def write(path: Path, data: Any) -> None:
    """Writes the numbers of a figure."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from None
