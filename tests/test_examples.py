"""The trainer at toy size: whole runs, resuming, the errors a person meets, and the data."""

import dataclasses
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
import unittest.mock
from pathlib import Path

import jax
import pytest

from examples import config as configs
from examples import loop, runs
from examples.config import DataConfig, OptimizerConfig, RunConfig
from examples.train import main

ROOT = Path(__file__).parent.parent
STEPS = 24
# One shape and one number of steps for all runs, so that each program is compiled once.
TOY = (
    "gpt-micro --model.n-layer 1 --model.d-model 16 --model.context 16 --data.vocab-size 300 "
    f"--steps {STEPS} --batch-size 8 --eval-every 10 --checkpoint-every 8 --eval-batches 2 "
    "--sample-tokens 20"
).split()


@pytest.fixture(scope="module", autouse=True)
def one_device():
    """Most runs have one; `test_trainer_*.py` is about more."""
    with unittest.mock.patch.object(jax, "devices", return_value=jax.devices()[:1]):
        yield


@pytest.fixture(scope="module")
def finished(one_device, tmp_path_factory, text):
    """A run that was never stopped."""
    root = tmp_path_factory.mktemp("runs")
    assert train(text, root, "--name", "whole") == 0
    return root / "whole"


def train(text, root, *flags):
    return main([*TOY, "--data.paths", str(text), "--runs-dir", str(root), *flags])


def losses(folder, kind="train_loss"):
    return {r["step"]: r[kind] for r in runs.read_metrics(folder / "metrics.jsonl") if kind in r}


def saved_step(folder):
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    return max(int(name) for name in names if name.isdecimal())  # others are being written


def run_shell(*flags, devices=1):
    """A run as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "examples.train", *flags],
        cwd=ROOT,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


# Whole runs


def test_loss_falls(finished):
    train_loss = losses(finished)
    assert list(train_loss) == list(range(1, STEPS + 1))
    assert train_loss[1] == pytest.approx(math.log(300), abs=0.1)  # uniform at the start
    assert train_loss[STEPS] < train_loss[1] - 0.5
    val = losses(finished, "val_loss")
    assert list(val) == [10, 20, STEPS]
    assert val[STEPS] < val[10] < math.log(300)


def test_files_of_a_run(finished):
    records = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert all(isinstance(record["step"], int) and len(record) > 1 for record in records)
    last = records[-1]
    assert last["step"] == STEPS
    assert last["val_perplexity"] == pytest.approx(math.exp(last["val_loss"]))
    speeds = [r["tokens_per_second"] for r in records if "tokens_per_second" in r]
    assert len(speeds) == STEPS - 5 and min(speeds) > 0  # none at the start and after a pause
    assert (finished / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert len((finished / "sample.txt").read_text(encoding="utf-8")) > 10
    assert saved_step(finished) == STEPS


def test_summary(finished, text, capsys):
    # A finished run that is resumed has nothing to train, and reports again.
    before = (finished / "metrics.jsonl").read_text()
    assert main(["--resume", str(finished)]) == 0
    assert (finished / "metrics.jsonl").read_text() == before
    shown = capsys.readouterr().out
    val = runs.read_metrics(finished / "metrics.jsonl")[-1]
    assert f"validation loss  {val['val_loss']:.4f}" in shown
    assert f"bits per byte    {val['val_bits_per_byte']:.4f}" in shown
    assert f"files            {finished}" in shown


def test_lines_without_a_terminal(tmp_path, text, capsys):
    assert train(text, tmp_path) == 0
    shown = capsys.readouterr().out
    assert (tmp_path / "gpt-micro-muonplus").is_dir()  # named after preset and optimizer
    assert "wte/embedding" in shown  # the table of what happens to each parameter
    lines = [line for line in shown.splitlines() if line.startswith(f"step {STEPS}/{STEPS}")]
    assert len(lines) == 1
    assert all(word in lines[0] for word in ("tokens/s", "perplexity", "bits per byte"))


def test_records_of_the_matrices(tmp_path, text, finished):
    assert not (finished / runs.MATRICES).exists()
    with stop_at(18, crash), pytest.raises(RuntimeError):
        train(text, tmp_path, "--name", "x", "--optimizer.record-every", "6")
    assert main(["--resume", str(tmp_path / "x")]) == 0
    assert losses(tmp_path / "x") == losses(finished)  # what is watched is not changed
    records = runs.read_metrics(tmp_path / "x" / runs.MATRICES)
    assert [(r["step"], r["update"]) for r in records] == [(n, n) for n in (6, 12, 18, 24)]
    for record in records:
        assert "blocks/0/mlp/up/kernel" in record["values"]
        for values in record["values"].values():
            assert 0 < values["update/row_variance"] < 1e-6 * values["polar/row_variance"]


# Stopping and resuming


def stop_at(step, how, kind="train_loss"):
    """Makes a run meet `how` while a loss of a step is written down."""
    add = runs.Metrics.add

    def add_and_stop(self, at, **measured):
        add(self, at, **measured)
        if at == step and kind in measured:
            how()

    return unittest.mock.patch.object(runs.Metrics, "add", add_and_stop)


def crash():
    raise RuntimeError("power cut")


def test_ctrl_c_then_resume_is_exact(tmp_path, text, finished, capsys):
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
    assert losses(folder) == losses(finished)
    assert losses(folder, "val_loss") == losses(finished, "val_loss")
    assert (folder / "sample.txt").read_text() == (finished / "sample.txt").read_text()


def test_ctrl_c_during_an_evaluation(tmp_path, text):
    with stop_at(10, lambda: signal.raise_signal(signal.SIGINT), kind="val_loss"):
        assert train(text, tmp_path, "--name", "x") == 130
    assert saved_step(tmp_path / "x") == 10  # though a checkpoint was not due


def test_crash_then_resume_is_exact(tmp_path, text, finished):
    with stop_at(13, crash), pytest.raises(RuntimeError, match="power cut"):
        train(text, tmp_path, "--name", "x")
    path = tmp_path / "x" / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 14, "train_l')  # the line that was being written
    assert main(["--resume", str(tmp_path / "x")]) == 0
    records = runs.read_metrics(path)
    assert [r["step"] for r in records if "train_loss" in r] == list(range(1, STEPS + 1))
    assert losses(tmp_path / "x") == losses(finished)


def test_crash_before_the_first_checkpoint(tmp_path, text, finished):
    with stop_at(3, crash), pytest.raises(RuntimeError):
        train(text, tmp_path, "--name", "x")
    assert main(["--resume", str(tmp_path / "x")]) == 0
    assert losses(tmp_path / "x") == losses(finished)


def test_ctrl_c_in_a_shell(tmp_path, text):
    flags = [*TOY, "--data.paths", str(text), "--runs-dir", str(tmp_path)]
    process = run_shell(*flags, "--name", "x")
    metrics = tmp_path / "x" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not metrics.exists() and time.monotonic() < deadline:  # the first step comes next
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"python -m examples.train --resume {tmp_path / 'x'}" in shown
    assert "Traceback" not in shown


# What a person can get wrong


def error_of(capsys, *argv):
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err


def test_run_folder_exists(tmp_path, text, capsys):
    (tmp_path / "taken").mkdir()
    assert train(text, tmp_path, "--name", "taken") == 2
    shown = capsys.readouterr().err
    assert str(tmp_path / "taken") in shown and "--name" in shown and "--resume" in shown


def test_unused_name(tmp_path):
    config = RunConfig(runs_dir=str(tmp_path))
    for expected in ("p-muonplus", "p-muonplus-2", "p-muonplus-3"):
        folder = runs.choose_folder(config, "p")
        assert folder == tmp_path / expected
        folder.mkdir()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        (b"", "empty"),
        (b" \n\n ", "empty"),
        (b"caf\xe9 " * 1000, "not UTF-8"),
        (b"short", "too little text"),
        (b"word " * 500, "too little validation text"),
    ],
)
def test_text_that_cannot_be_used(tmp_path, capsys, content, words):
    path = tmp_path / "given.txt"
    if content is not None:
        path.write_bytes(content)
    shown = error_of(capsys, *TOY, "--data.paths", str(path), "--runs-dir", str(tmp_path / "runs"))
    assert words in shown
    assert not (tmp_path / "runs").exists()  # a failed start leaves no run behind


def test_too_little_training_text(tmp_path, capsys):
    path = tmp_path / "given.txt"
    path.write_text("".join(f"{i} squared is {i * i}\n" for i in range(100)))
    shown = error_of(capsys, *TOY, "--data.paths", str(path), "--data.val-fraction", "0.7")
    assert "too little training text" in shown


def test_folder_without_text(tmp_path, capsys):
    (tmp_path / "image.bin").write_bytes(b"123")
    assert "holds no .txt" in error_of(capsys, *TOY, "--data.paths", str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model.d-model", "17"], "--model.n-head"),
        (["--steps", "0"], "--steps is 0"),
        (["--optimizer.record-every", "-1"], "--optimizer.record-every is -1"),
        (["--data.val-fraction", "1"], "--data.val-fraction"),
        (["--data.vocab-size", "100"], "--data.vocab-size"),
    ],
)
def test_numbers_that_cannot_be(flags, words, capsys):
    assert words in error_of(capsys, *TOY, *flags)


def test_unknown_preset(capsys):
    assert "did you mean gpt-small" in error_of(capsys, "gpt-smal", "--steps", "3")
    assert "--help lists them" in error_of(capsys, "colour")


def test_resume_needs_a_run(tmp_path, capsys):
    assert "no config.json" in error_of(capsys, "--resume", str(tmp_path))
    (tmp_path / "config.json").write_text('{"config": {"colour": 1}}')
    assert "not written by this version" in error_of(capsys, "--resume", str(tmp_path))


def test_resume_with_another_text(tmp_path, text, capsys):
    own = tmp_path / "own.txt"
    own.write_bytes(text.read_bytes())
    with stop_at(3, lambda: signal.raise_signal(signal.SIGINT)):
        assert train(own, tmp_path, "--name", "x") == 130
    own.write_bytes(text.read_bytes() + b"more")
    assert "the text is not the one" in error_of(capsys, "--resume", str(tmp_path / "x"))


def losses_are(broken, loss=math.nan):
    """Makes the loss of some steps be read as `loss`."""
    calls = itertools.count(1)
    return unittest.mock.patch.object(
        loop, "float", lambda x: loss if next(calls) in broken else float(x), create=True
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_diverging_run(tmp_path, text, capsys, loss):
    with losses_are(range(4, STEPS + 1), loss):
        assert train(text, tmp_path, "--name", "x", "--max-skipped", "5") == 2
    shown = capsys.readouterr()
    assert "at 6 steps in a row, the last of them step 9" in shown.err
    assert "the last checkpoint is of step 8" in shown.err and saved_step(tmp_path / "x") == 8
    assert "lower --optimizer.learning-rate" in shown.err and "--max-skipped" in shown.err
    assert f"step 4/{STEPS}  loss or gradient not finite: left out" in shown.out


def test_skipped_steps(tmp_path, text):
    with losses_are({2, 3, 5, 6}):  # never more than two in a row
        assert train(text, tmp_path, "--name", "x", "--max-skipped", "2") == 0
    assert losses(tmp_path / "x", "skipped") == {2: 1, 3: 2, 5: 1, 6: 2}
    assert list(losses(tmp_path / "x")) == [1, 4, *range(7, STEPS + 1)]


def test_config_survives_json():
    config = RunConfig(data=DataConfig(paths=("a", "b")), optimizer=OptimizerConfig(clip_norm=None))
    written = json.dumps(dataclasses.asdict(config))
    assert configs.from_dict(RunConfig, json.loads(written)) == config


def test_unreadable_file(tmp_path, text, capsys):
    denied = PermissionError(13, "Permission denied")  # patched, since root may read all files
    with unittest.mock.patch.object(Path, "open", side_effect=denied):
        shown = error_of(capsys, *TOY, "--data.paths", str(text), "--runs-dir", str(tmp_path))
    assert f"cannot read {text}: Permission denied" in shown


def test_cache_that_cannot_be_written(tmp_path, text, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "XDG_CACHE_HOME" in error_of(capsys, *TOY, "--data.paths", str(text))
