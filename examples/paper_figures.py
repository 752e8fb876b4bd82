"""The paper's figures of imbalance: `python -m examples.paper_figures SWEEP --out DIR`.

SWEEP is the folder of a sweep with `--optimizer.record-every`; examples/README.md has its command.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from examples import claims, descent, figures, imbalance, tables
from examples import imbalance_figures as drawn
from examples.command import run_command
from examples.compilation import keep_compiled_programs
from examples.errors import UserError
from examples.tables import MUON
from examples.trained import Place

PROGRAM = "python -m examples.paper_figures"


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    return run_command(lambda: print(tyro.cli(draw, args=argv, prog=PROGRAM)))


def draw(
    recorded: Annotated[Path, tyro.conf.Positional],
    out: Path,
    sweeps: tuple[Path, ...] = (),
    step: int | None = None,
    kind: str = "query",
    layer: int = 2,
    curvature: bool = True,
) -> Path:
    """Draws what the paper shows of imbalance, with the numbers beside each figure.

    Args:
      recorded: folder of a sweep whose runs recorded their matrices, Muon's and Muon+'s among them.
      out: where to write.
      sweeps: folders of sweeps over learning rates, for what the paper says of large ones.
      step: the checkpoint that momenta are from; the last by default.
      kind: which matrix is drawn entry by entry.
      layer: of which layer; the curvature is that of its matrices.
      curvature: measure the loss's curvature along updates, which takes minutes.
    """
    keep_compiled_programs()
    records = imbalance.read(recorded)
    muon, _ = (imbalance.of(method, records) for method in (MUON, claims.PLUS))
    step, moments = imbalance.momenta(muon, step)
    title = f"{kind} of layer {layer}, step {step} of {recorded.name}"

    def figure(name: str, data: Any, plot: Callable[[Any, Path], None]) -> Any:
        write(out / f"{name}.json", data)
        plot(data, out / f"{name}.png")
        return data

    iterations = figure("iterations", imbalance.by_iterations(moments), drawn.plot_iterations)
    training = figure("training", imbalance.during_training(records), drawn.plot_training)
    ranks = figure("ranks", imbalance.rank_correlations(muon), drawn.plot_rank_correlations)
    figure("regions", imbalance.regions(), drawn.plot_regions)
    figure(
        "entries",
        imbalance.entries(moments, kind, layer),
        lambda data, path: drawn.plot_entries(data, title, path),
    )
    bounds = None
    if curvature:
        bounds = descent.compare(Place(muon.folder, step), layer)
        write(out / "curvature.json", bounds)
    compared = [tables.read(folder) for folder in sweeps]
    if compared:
        curves = {sweep.name: figures.training_curves(sweep) for sweep in compared}
        write(out / "stability.json", curves)
        figures.plot_stability(compared, out / "stability.png")
    path = out / "claims.md"
    path.write_text(claims.table(iterations, training, ranks, bounds, compared) + "\n")
    return path


def write(path: Path, data: Any) -> None:
    """The numbers behind a figure."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
