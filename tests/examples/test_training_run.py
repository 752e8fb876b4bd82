"""Whole training runs at toy size: what they write, stopping, crashing and resuming."""

import json
import math
import shutil
import signal

import pytest

from examples.train import main
from examples.trainer.runs.metrics import MATRICES, TOKENS_PER_SECOND, read_metrics
from tests.support.trainer import (
    PATIENCE,
    STEPS,
    TOY,
    crash,
    losses,
    losses_are,
    run_shell,
    saved_step,
    stop_at,
    train,
    wait_for,
)

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
    val = read_metrics(finished / "metrics.jsonl")[-1]
    assert f"validation loss  {val['val_loss']:.4f}" in shown
    assert f"bits per byte    {val['val_bits_per_byte']:.4f}" in shown
    assert f"files            {finished}" in shown
    assert main(["--resume", str(finished), "--profile", "3:4"]) == 2
    assert f"the run goes on with step {STEPS + 1}" in capsys.readouterr().err


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


def test_matrices_are_recorded_across_a_crash_and_change_no_loss(tmp_path, text, trained_run):
    assert not (trained_run / MATRICES).exists()
    with stop_at(18, crash), pytest.raises(RuntimeError):
        train(text, tmp_path, "--name", "x", "--optimizer.record-every", "6")
    assert main(["--resume", str(tmp_path / "x")]) == 0
    assert losses(tmp_path / "x") == losses(trained_run)  # what is watched is not changed
    records = read_metrics(tmp_path / "x" / MATRICES)
    assert [(r["step"], r["update"]) for r in records] == [(n, n) for n in (6, 12, 18, 24)]
    for record in records:
        assert "blocks/0/mlp/up/kernel" in record["values"]
        for values in record["values"].values():
            assert 0 < values["update/row_variance"] < 1e-6 * values["polar/row_variance"]


# Stopping and resuming


def test_ctrl_c_then_resume_gives_the_same_losses(tmp_path, text, trained_run, capsys):
    with stop_at(11, lambda: signal.raise_signal(signal.SIGINT)):
        assert train(text, tmp_path, "--name", "a b") == 130
    folder = tmp_path / "a b"
    shown = capsys.readouterr().out
    assert f"python -m examples.train --resume '{folder}'" in shown
    stopped_after = max(losses(folder))
    assert 11 <= stopped_after <= 12  # the step under way is finished
    assert f"stopped after step {stopped_after}" in shown
    assert saved_step(folder) == stopped_after
    assert main(["--resume", str(folder)]) == 0
    assert losses(folder) == losses(trained_run)
    assert losses(folder, "val_loss") == losses(trained_run, "val_loss")
    assert (folder / "sample.txt").read_text() == (trained_run / "sample.txt").read_text()


def test_ctrl_c_during_an_evaluation_saves_that_step(tmp_path, text):
    with stop_at(10, lambda: signal.raise_signal(signal.SIGINT), kind="val_loss"):
        assert train(text, tmp_path, "--name", "x") == 130
    assert saved_step(tmp_path / "x") == 10  # though a checkpoint was not due


def test_crash_then_resume_gives_the_same_losses(tmp_path, text, trained_run):
    with stop_at(13, crash), pytest.raises(RuntimeError, match="power cut"):
        train(text, tmp_path, "--name", "x")
    path = tmp_path / "x" / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 14, "train_l')  # the line that was being written
    assert main(["--resume", str(tmp_path / "x")]) == 0
    records = read_metrics(path)
    assert [r["step"] for r in records if "train_loss" in r] == list(range(1, STEPS + 1))
    for kind in ("train_loss", "grad/norm/total", "optim/learning_rate"):
        assert losses(tmp_path / "x", kind) == losses(trained_run, kind)


def test_crash_before_the_first_checkpoint_then_resume(tmp_path, text, trained_run):
    with stop_at(3, crash), pytest.raises(RuntimeError):
        train(text, tmp_path, "--name", "x")
    assert main(["--resume", str(tmp_path / "x")]) == 0
    assert losses(tmp_path / "x") == losses(trained_run)


def test_ctrl_c_in_a_shell_exits_with_130_and_says_how_to_resume(tmp_path, text):
    # So many steps that the run is not over before the signal arrives.
    flags = [*TOY, "--steps", "100000", "--data.paths", str(text), "--runs-dir", str(tmp_path)]
    process = run_shell(*flags, "--name", "x")
    metrics = tmp_path / "x" / "metrics.jsonl"
    wait_for(metrics.exists, process)  # the first step comes next
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert f"python -m examples.train --resume {tmp_path / 'x'}" in shown
    assert "Traceback" not in shown


# Steps that are not finite


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_run_that_stays_not_finite_stops_with_advice(tmp_path, text, capsys, loss):
    with losses_are(range(4, STEPS + 1), loss):
        assert train(text, tmp_path, "--name", "x", "--max-skipped", "5") == 2
    shown = capsys.readouterr()
    assert "at 6 steps in a row, the last of them step 9" in shown.err
    assert "the last checkpoint is of step 8" in shown.err and saved_step(tmp_path / "x") == 8
    assert "lower --optimizer.learning-rate" in shown.err and "--max-skipped" in shown.err
    assert f"step 4/{STEPS}  loss or gradient not finite: left out" in shown.out


def test_steps_that_are_not_finite_are_skipped_and_counted(tmp_path, text):
    with losses_are({2, 3, 5, 6}):  # never more than two in a row
        assert train(text, tmp_path, "--name", "x", "--max-skipped", "2") == 0
    assert losses(tmp_path / "x", "skipped") == {2: 1, 3: 2, 5: 1, 6: 2}
    assert list(losses(tmp_path / "x")) == [1, 4, *range(7, STEPS + 1)]
