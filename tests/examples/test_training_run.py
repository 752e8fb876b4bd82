"""Whole runs at toy size: what they write and print, their figures, saves and evaluations."""

import io
import json
import math
import shutil
import unittest.mock

import jax
import numpy as np
import pytest
from rich.console import Console

from examples.train import main
from examples.trainer.runs import metrics, report
from examples.trainer.runs.metrics import (
    ADAM_RATE,
    GRADIENT_NORM,
    LEARNING_RATE,
    MFU,
    TOKENS_PER_SECOND,
    Display,
)
from examples.trainer.settings.run import ModelConfig, RunConfig
from examples.trainer.system.files import read_json_lines
from examples.trainer.training.optimizers import Rates
from examples.trainer.training.step import Measured
from tests.support.trainer import STEPS, losses, losses_are, saved_step, train

pytestmark = pytest.mark.usefixtures("one_device")


def test_loss_falls(trained_run):
    train_loss = losses(trained_run)
    assert list(train_loss) == list(range(1, STEPS + 1))
    assert train_loss[1] == pytest.approx(math.log(300), abs=0.1)  # uniform at the start
    assert train_loss[STEPS] < train_loss[1] - 0.5
    val = losses(trained_run, "val_loss")
    assert list(val) == [10, 20, STEPS]
    assert val[STEPS] < val[10] < math.log(300)


def test_run_folder_holds_metrics_curves_sample_and_checkpoint(trained_run):
    lines = (trained_run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert all(isinstance(record["step"], int) and len(record) > 1 for record in records)
    last = records[-1]
    assert last["step"] == STEPS
    assert last["val_perplexity"] == pytest.approx(math.exp(last["val_loss"]))
    speeds = [r[TOKENS_PER_SECOND] for r in records if TOKENS_PER_SECOND in r]
    assert len(speeds) == STEPS - 5 and min(speeds) > 0  # none at the start and after a pause
    assert (trained_run / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert len((trained_run / "sample.txt").read_text(encoding="utf-8")) > 10
    assert saved_step(trained_run) == STEPS


def test_resuming_a_finished_run_only_reports_again(trained_run, tmp_path, capsys):
    finished = shutil.copytree(trained_run, tmp_path / "x")
    before = (finished / "metrics.jsonl").read_text()
    assert main(["--resume", str(finished)]) == 0
    assert (finished / "metrics.jsonl").read_text() == before
    shown = capsys.readouterr().out
    val = read_json_lines(finished / "metrics.jsonl")[-1]
    assert f"validation loss  {val['val_loss']:.4f}" in shown
    assert f"bits per byte    {val['val_bits_per_byte']:.4f}" in shown
    assert f"files            {finished}" in shown


def test_lines_are_printed_without_a_terminal(tmp_path, text, capsys):
    assert train(text, tmp_path) == 0
    shown = capsys.readouterr().out
    assert (tmp_path / "gpt-micro-muonplus").is_dir()  # named after preset and optimizer
    assert "wte/embedding" in shown  # the table of what happens to each parameter
    lines = shown.splitlines()
    (last,) = (i for i, line in enumerate(lines) if line.startswith(f"step {STEPS}/{STEPS}"))
    assert all(word in lines[last] for word in ("loss", "grad", "tokens/s"))
    assert all(word in lines[last + 1] for word in ("val loss", "perplexity", "bits per byte"))
    assert max(map(len, lines[last : last + 2])) <= 100


def test_peaks_are_found_by_the_beginning_of_a_kind():
    assert metrics.peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert metrics.peak_of("NVIDIA H100 PCIe") == 756e12
    assert metrics.peak_of("TPU v5 lite") == 197e12 and metrics.peak_of("TPU v5") == 459e12
    assert metrics.peak_of("TPU v5e") == 197e12 and metrics.peak_of("TPU v6e") == 918e12
    assert metrics.peak_of("cpu") is None


ALWAYS = {"step", "train_loss", "grad/norm/total", "optim/learning_rate", "optim/adam_lr"}


def test_each_step_has_its_figures_under_their_names(tmp_path, text):
    with losses_are({5}):  # as if it had been skipped
        assert train(text, tmp_path, "--name", "x", "--optimizer.clip-norm", "0.01") == 0
    records = read_json_lines(tmp_path / "x" / "metrics.jsonl")
    assert [r["step"] for r in records if "skipped" in r] == [5]
    records = [r for r in records if "train_loss" in r]
    speed = {"throughput/duration", TOKENS_PER_SECOND, "throughput/loading_time"}
    assert [set(record) - ALWAYS for record in records[:3]] == [set(), speed, speed]
    for record in records:
        assert record[GRADIENT_NORM] > 0.1  # before it is clipped
        if TOKENS_PER_SECOND in record:
            rate = 8 * 16 / record["throughput/duration"]
            assert record[TOKENS_PER_SECOND] == pytest.approx(rate, rel=1e-4)
    # 40% of the steps at the peak, then down to zero.
    hold = int(0.4 * STEPS)
    falling = [r["optim/learning_rate"] for r in records if r["step"] > hold + 2]
    expected = [0.02 * (1 - (step - 1 - hold) / (STEPS - hold)) for step in range(hold + 3, 25)]
    assert falling == pytest.approx(expected, rel=1e-4)


def test_mfu_is_the_work_of_the_model_over_the_peak():
    config = RunConfig(model=ModelConfig(n_layer=1, d_model=16, context=8), batch_size=16)
    mesh = unittest.mock.Mock(size=2)
    mesh.devices.flat = [unittest.mock.Mock(device_kind="NVIDIA H200")]
    # 12 d^2 weights of a layer and d for each token of the vocabulary, attention T d.
    flops = 6.0 * (12 * 16**2 + 16 * 300 + 8 * 16)
    expected = {TOKENS_PER_SECOND: 128, MFU: pytest.approx(100 * 128 * flops / (2 * 989e12))}
    assert metrics.work_of(config, 300, mesh) == expected
    mesh.devices.flat = [unittest.mock.Mock(device_kind="cpu")]
    assert metrics.work_of(config, 300, mesh) == {TOKENS_PER_SECOND: 128}


def progress_of(figures, terminal=False, steps=10):
    shown = io.StringIO()
    display = Display(Console(file=shown, force_terminal=terminal, width=100), steps)
    display.begin(0)
    for step, one in figures:
        display.record(step, {"train_loss": 1.0, GRADIENT_NORM: 1.0, **one})
    display.close()
    return display, shown.getvalue()


def test_time_left_is_of_the_median_step_whatever_an_evaluation_takes():
    timed = [(step, {"throughput/duration": 30.0, TOKENS_PER_SECOND: 7.0}) for step in (2, 3, 4)]
    display, _ = progress_of([(1, {}), *timed])
    assert display.status.endswith("3:00 left") and " 7 tokens/s" in display.status
    val = {"val_loss": 1.0, "val_perplexity": math.e, "val_bits_per_byte": 1.0}
    display.record(4, val)
    display.record(5, {"train_loss": 1.0, GRADIENT_NORM: 1.0})  # the step after it is not timed
    assert display.status.endswith("2:30 left")


def test_without_a_terminal_a_line_comes_every_ten_seconds(monkeypatch):
    monkeypatch.setattr(metrics, "QUIET_SECONDS", 0.0)
    _, shown = progress_of([(1, {}), (2, {})])
    assert [line.split("  ")[0] for line in shown.splitlines()] == [
        "compiling ...",
        "step 1/10",
        "step 2/10",
    ]


def test_the_bar_leaves_no_line_when_it_ends():
    _, shown = progress_of([(10, {})], terminal=True)
    assert "10/10" in shown and shown.endswith("\x1b[2K")


def test_a_run_that_stays_not_finite_stops_with_advice(tmp_path, text, capsys):
    with losses_are(range(4, STEPS + 1)):
        assert train(text, tmp_path, "--name", "x") == 2
    shown = capsys.readouterr()
    assert "at 11 steps in a row, the last of them step 14" in shown.err
    assert "the last checkpoint is of step 8" in shown.err and saved_step(tmp_path / "x") == 8
    assert "lower --optimizer.learning-rate" in shown.err
    assert f"step 4/{STEPS}  loss or gradient not finite: left out" in shown.out


def test_against_another_rule_draws_both_curves(tmp_path, text, capsys):
    rate = ("--optimizer.learning-rate", "0.03")  # AdamW's would be another
    flags = ("--name", "x", "--against", "adamw", "--steps", "12", *rate)
    assert train(text, tmp_path, *flags) == 0
    folders = [tmp_path / name for name in ("x", "x-adamw")]
    ends = [losses(folder, "val_loss")[12] for folder in folders]
    shown = capsys.readouterr().out
    assert f"Muon+ at 0.03 {ends[0]:.4f}, AdamW at 0.002 {ends[1]:.4f}: a difference of" in shown
    assert (folders[0] / "against.png").read_bytes().startswith(b"\x89PNG")
    config = [json.loads((x / "config.json").read_text())["config"] for x in folders]
    assert [x["optimizer"].pop("name") for x in config] == ["muonplus", "adamw"]
    assert [x.pop("name") for x in config] == ["x", "x-adamw"]
    assert [x["optimizer"].pop("learning_rate") for x in config] == [0.03, None]
    assert config[0] == config[1]
    assert train(text, tmp_path, "--name", "y", "--against", "muonplus") == 2
    assert "the run itself has that rule" in capsys.readouterr().err


def test_a_profile_of_a_few_steps(tmp_path, text):
    assert train(text, tmp_path, "--name", "x", "--profile", "2", "--steps", "6") == 0
    assert list((tmp_path / "x" / "profile").rglob("*.xplane.pb"))


def test_the_picture_has_the_rates():
    records = [
        {"step": i, "train_loss": 1.0, LEARNING_RATE: 0.1, ADAM_RATE: 0.2, "val_loss": 1.0}
        for i in (1, 2)
    ]
    below = report.draw_losses(records, "x").axes[1]
    assert [line.get_ydata()[0] for line in below.get_lines()] == [0.1, 0.2]


def test_figures_of_a_step_need_no_other_program(tmp_path):
    """Devices work in order: another one would wait until the next step is done."""
    measured = Measured(np.float32(1), np.float32(2), Rates(np.float32(0.1), np.float32(0.2)))
    with (
        unittest.mock.patch.object(jax, "jit", side_effect=AssertionError),
        metrics.Recorder({}, tmp_path, [], 0) as recorder,
    ):
        recorder.add(1, measured, 0.0)
        recorder.write()
    [record] = read_json_lines(tmp_path / "metrics.jsonl")
    assert (record[LEARNING_RATE], record[ADAM_RATE]) == (0.1, 0.2)
