"""What the width changes: coordinate checks, and best rates of sweeps."""

import dataclasses
import json
import unittest.mock

import jax.numpy as jnp
import pytest

from examples import widths as command
from examples.experiments.sweeps import coordinates, plan, widths
from examples.experiments.sweeps.grid import Trial
from examples.experiments.sweeps.ledger import Ledger
from examples.experiments.sweeps.results import MUON
from examples.trainer.settings.presets import PRESETS
from tests.support.sweep_results import PLUS, result

MODEL = ("gpt-micro", "--model.n-layer", "2", "--model.context", "16", "--data.vocab-size", "300")
GRID = ("--grid.optimizers", "muon", "--widths", "16", "32", "--head", "8", "--updates", "2")


def test_a_check_measures_each_width_once(text, tmp_path):
    flags = ["check", *MODEL, *GRID, "--data.paths", str(text), "--out", str(tmp_path)]
    assert command.main(flags) == 0
    narrow, wide = coordinates.read(tmp_path / "coordinates.jsonl")
    assert [narrow["width"], wide["width"]] == [16, 32]
    for record in (narrow, wide):
        assert list(record["activations"]) == ["block 1", "block 2", "logits"]
        assert all(0 < record["changes"][x] < 10 for x in record["activations"])
        # Orthogonal updates: of (out, in) = (4 d, d), sqrt(4) times a matrix of rms 1 / sqrt(4 d).
        size = 0.02 / record["width"] ** 0.5
        assert record["last_update"]["blocks/1/mlp/up/kernel"] == pytest.approx(size, rel=0.3)
    assert "gpt, rates 0.02 and 0.01: Muon, spectral" in (tmp_path / "coordinates.md").read_text()
    assert (tmp_path / "coordinates.png").stat().st_size > 1000
    with unittest.mock.patch.object(coordinates, "measured", side_effect=AssertionError):
        assert command.main(flags) == 0  # nothing is left to measure


def test_the_change_is_that_since_the_start(text, tmp_path):
    """Without updates nothing has changed; the initial activations are what is left."""
    given = ["--widths", "16", "--updates", "0"]
    flags = [*MODEL, *GRID, *given, "--data.paths", str(text), "--out", str(tmp_path)]
    asked = coordinates.parse(flags)
    for record in coordinates.read(coordinates.run(asked)):
        assert set(record["changes"].values()) == {0.0} == set(record["last_update"].values())
        assert min(record["activations"].values()) > 0


def test_exponents_are_slopes_of_logarithms():
    assert widths.exponent({64: 2.0, 128: 4.0, 256: 8.0}) == pytest.approx(1)
    assert widths.exponent({64: 3.0, 256: 1.5}) == pytest.approx(-0.5)
    assert jnp.isnan(widths.exponent({64: 3.0}))


@pytest.fixture
def sweeps(tmp_path):
    """Two widths: the best rate of Muon falls with the width, that of Muon+ is at the edge."""
    config = PRESETS["gpt-micro"][1]
    for width, best in ((32, 0.2), (64, 0.1)):
        folder = tmp_path / f"width-{width}"
        folder.mkdir()
        model = dataclasses.replace(config.model, d_model=width)
        base = plan.shared_config(dataclasses.replace(config, model=model))
        (folder / "sweep.json").write_text(json.dumps({"base": dataclasses.asdict(base)}))
        for rate in (0.05, 0.1, 0.2, 0.4):
            Ledger(folder).add(Trial(MUON, rate, 0), result(2.0 + abs(rate - best)))
            Ledger(folder).add(Trial(PLUS, rate, 0), result(2.0 + rate))
    return tmp_path


def test_best_rates_by_width(sweeps):
    folders = [str(sweeps / f"width-{width}") for width in (64, 32)]
    assert command.main(["rates", *folders, "--out", str(sweeps)]) == 0
    page = (sweeps / "rates.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    assert ["gpt: Muon, spectral", "0.2", "0.1"] in rows
    assert ["gpt: Muon+ col_row, spectral", "0.05*", "0.05*"] in rows
    assert (sweeps / "rates.png").stat().st_size > 1000


def test_two_sweeps_of_one_method_and_width_raise(sweeps, capsys):
    folder = str(sweeps / "width-32")
    assert command.main(["rates", folder, folder, "--out", str(sweeps)]) == 2
    assert "at width 32, as another sweep does" in capsys.readouterr().err


def test_figures_have_a_row_of_panels_for_each_family(tmp_path):
    """A curve is in the row of its family, and a method has one colour in all of them."""
    families = {"gpt": ["Muon", "NorMuon"], "llama": ["NorMuon"]}
    curves = {
        widths.Label(family, name): {16: 1.0, 32: 2.0}
        for family, names in families.items()
        for name in names
    }
    with unittest.mock.patch.object(widths.Figure, "savefig", autospec=True) as save:
        widths.draw({"change": curves, "update": curves}, "rms", tmp_path / "a.png")
    (figure,) = save.call_args.args[:1]
    assert [len(one.lines) for one in figure.axes] == [2, 2, 1, 1]
    assert figure.axes[0].lines[1].get_color() == figure.axes[2].lines[0].get_color()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts] == ["Muon", "NorMuon"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give check PRESET, or rates SWEEP"),
        (["draw"], "give check PRESET, or rates SWEEP"),
        (["rates", "--out", "x"], "give the folders of sweeps"),
        (["check", "gpt-micro", "--widths", "33", "--head", "16"], "--model.d-model 33"),
    ],
)
def test_wrong_commands_are_explained(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.main(words) == 2
    assert message in capsys.readouterr().err
