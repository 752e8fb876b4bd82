"""The report of sweeps: `report.md` with tables, and its figures."""

from collections.abc import Sequence
from pathlib import Path

from examples.experiments.sweeps import figures, results, tables
from examples.experiments.sweeps.results import Sweep
from examples.trainer.system.errors import UserError

FIGURES = {
    "Validation perplexity by rate, first seed": ("rates.png", figures.plot_rates),
    "Validation loss at each method's best rate": ("curves.png", figures.plot_curves),
    "Muon+ less Muon, each at its best rate": ("gains.png", figures.plot_gains),
}
"""Title to file name and function."""


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Writes `report.md` and its figures; the path of `report.md`."""
    if not folders:
        raise UserError("give the folders of sweeps.")
    sweeps = [results.read(folder) for folder in folders]
    out.mkdir(parents=True, exist_ok=True)
    parts = [f"## {title}\n\n{text}\n" for title, text in tables.sections(sweeps)]
    for title, (name, plot) in FIGURES.items():
        plot(sweeps, out / name)
        parts.append(f"## {title}\n\n![{title}]({name})\n")
    path = out / "report.md"
    path.write_text(f"# Results\n\n{notes(sweeps)}\n\n" + "\n".join(parts), encoding="utf-8")
    return path


def notes(sweeps: Sequence[Sweep]) -> str:
    lines = ["Loss in nats per token. Mean ± standard deviation over seeds; further seeds than"]
    lines.append("the first are run at each method's best rate only.")
    if any(sweep.at_edge(method) for sweep in sweeps for method in sweep.methods()):
        lines.append("*: the best rate is the lowest or highest that was tried; try more.")
    return "\n".join(lines)
