"""Tables and figures of one sweep or several: `python -m examples.report FOLDER ... --out DIR`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from examples import figures, tables
from examples.command import run_command
from examples.errors import UserError
from examples.tables import Sweep

PROGRAM = "python -m examples.report"


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    return run_command(lambda: print(tyro.cli(report, args=argv, prog=PROGRAM)))


def report(folders: Annotated[tuple[Path, ...], tyro.conf.Positional], out: Path) -> Path:
    """Writes tables and figures of sweeps into a folder.

    Args:
      folders: those of the sweeps, each a model of its own in the tables.
      out: where to write.
    """
    return write_report(folders, out)


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Writes `report.md` and its figures; the path of the first."""
    if not folders:
        raise UserError("give the folders of sweeps.")
    sweeps = [tables.read(folder) for folder in folders]
    out.mkdir(parents=True, exist_ok=True)
    drawings = {
        "Validation perplexity by rate, first seed": ("rates.png", figures.plot_rates),
        "Validation loss at each method's best rate": ("curves.png", figures.plot_curves),
        "Muon+ less Muon, each at its best rate": ("gains.png", figures.plot_gains),
        "Training loss at large rates, first seed": ("stability.png", figures.plot_stability),
    }
    parts = [f"## {title}\n\n{text}\n" for title, text in tables.sections(sweeps)]
    for title, (name, plot) in drawings.items():
        plot(sweeps, out / name)
        parts.append(f"## {title}\n\n![{title}]({name})\n")
    path = out / "report.md"
    path.write_text(f"# Results\n\n{notes(sweeps)}\n\n" + "\n".join(parts), encoding="utf-8")
    return path


def notes(sweeps: Sequence[Sweep]) -> str:
    """What a reader has to know of all tables."""
    lines = ["Loss in nats per token. Mean ± standard deviation over seeds; further seeds than"]
    lines.append("the first are run at each method's best rate only.")
    if any(sweep.at_edge(method) for sweep in sweeps for method in sweep.methods()):
        lines.append("*: the best rate is the lowest or highest that was tried; try more.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
