"""Whole runs at toy size: what they write and print, their figures, saves and evaluations."""

import gzip
import io
import json
import math
import shutil
import signal
import threading
import unittest.mock

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import optax_muonplus as omp
from examples.train import main
from examples.trainer.data.placement import prefetch
from examples.trainer.runs import metrics, recorder, report
from examples.trainer.runs.metrics import (
    GRADIENT_NORM,
    MATRICES,
    MFU,
    RATES_AT_ONCE,
    TOKENS_PER_SECOND,
    LearningRates,
    Metrics,
    read_metrics,
)
from examples.trainer.runs.progress import Display
from examples.trainer.runs.recorder import Due, Recorder, seconds_since_evaluation
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.training import optimizers
from examples.trainer.training.evaluate import Evaluation
from examples.trainer.training.step import TrainState
from tests.support.trainer import (
    STEPS,
    crash,
    losses,
    losses_are,
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


# Checkpoints and evaluations by time


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets; seconds."""
    now = [0.0]
    monkeypatch.setattr(recorder.time, "monotonic", lambda: now[0])
    return now


def test_saves_are_asked_for_by_time_once(clock):
    saves = Due(every=100, minutes=15)
    asks = saves.asks
    assert not asks()
    clock[0] = 900
    assert asks() and not asks()  # until it is done
    saves.restart()
    assert not asks()
    clock[0] = 1799
    assert not asks()
    clock[0] = 1800
    assert asks()
    with unittest.mock.patch.object(recorder, "is_first", return_value=False):
        assert not Due(1, minutes=1e-9, gone=1).asks()
    assert not Due(1, minutes=0, gone=1).asks()


def test_a_run_saves_by_time_and_keeps_multiples_for_good(tmp_path, text):
    flags = ("--name", "x", "--checkpoint-minutes", "1e-9", "--keep-every", "7")
    assert train(text, tmp_path, *flags, "--checkpoint-every", "1000") == 0
    kept = {int(path.name) for path in (tmp_path / "x" / "checkpoints").iterdir()}
    assert kept == {7, 14, 21, STEPS - 1, STEPS}  # with the two newest, of every step


def test_time_goes_on_from_the_last_evaluation_of_a_resumed_run(clock):
    seconds = "throughput/duration"
    records = [{"step": 1, "val_loss": 2.5}, {"step": 2, seconds: 500}]
    records += [{"step": 2, "val_loss": 2.0}, {"step": 3}]
    records += [{"step": step, seconds: 20} for step in (4, 5)]
    evaluations = Due(every=10, minutes=1, gone=seconds_since_evaluation(records))
    clock[0] = 19
    assert not evaluations.asks()
    clock[0] = 20  # 60 s of training after the evaluation, 40 of them before the stop
    assert evaluations.asks()
    assert not Due(every=10, minutes=1).asks()
    assert [step for step in range(1, 16) if evaluations.is_due(step, step == 4)] == [4, 10]


def test_a_run_evaluates_by_time_and_once_where_it_is_resumed(tmp_path, text):
    minutes = ("--eval-minutes", "1e-9", "--eval-every", "1000")
    with stop_at(11, lambda: signal.raise_signal(signal.SIGTERM)):
        assert train(text, tmp_path, "--name", "x", *minutes) == 143
    assert main(["--resume", str(tmp_path / "x"), *minutes[:2]]) == 0
    records = read_metrics(tmp_path / "x" / "metrics.jsonl")
    for kind in ("train_loss", "val_loss"):
        found = [record["step"] for record in records if kind in record]
        assert found == list(range(1, STEPS + 1))


# Figures


SPEED = {
    "throughput/duration",
    "throughput/tokens_per_second",
    "throughput/gflops_per_second",
    "throughput/mfu",
    "throughput/loading_time",
    "perf/per_device_tokens_per_sec",
    "perf/per_device_tflops_per_sec",
}


ALWAYS = {"step", "train_loss", "grad/norm/total", "optim/learning_rate", "optim/adam_lr"}


def test_each_step_has_its_figures_under_their_names(tmp_path, text, capsys):
    with losses_are({5}):  # a step that is skipped uses up no learning rate
        flags = ("--peak-tflops", "0.5", "--profile", "11:12", "--optimizer.clip-norm", "0.01")
        assert train(text, tmp_path, "--name", "x", *flags) == 0
    records = [r for r in read_metrics(tmp_path / "x" / "metrics.jsonl") if "train_loss" in r]
    assert [set(record) - ALWAYS for record in records[:3]] == [set(), SPEED, SPEED]
    for record in records:
        assert record["grad/norm/total"] > 0.1  # before it is clipped
        if set(record) >= SPEED:
            tokens, seconds = 8 * 16, record["throughput/duration"]
            rate = record["throughput/tokens_per_second"]
            assert rate == pytest.approx(tokens / seconds, rel=1e-4)
            assert record["perf/per_device_tokens_per_sec"] == rate
            flops = record["throughput/gflops_per_second"] * 1e9
            assert record["throughput/mfu"] == pytest.approx(100 * flops / 0.5e12, rel=1e-4)
            # 12 d^2 weights of the layer and d for each token of the vocabulary, attention T d.
            assert flops / rate == pytest.approx(6 * (12 * 16**2 + 16 * 300 + 16 * 16), rel=0.03)
    # 40% of the steps at the peak, then down to zero; the step that was left out delays it by one.
    hold = int(0.4 * STEPS)
    falling = [r["optim/learning_rate"] for r in records if r["step"] > hold + 2]
    expected = [0.02 * (1 - (step - 2 - hold) / (STEPS - hold)) for step in range(hold + 3, 25)]
    assert falling == pytest.approx(expected, rel=1e-4)
    half = [r["optim/learning_rate"] / 2 for r in records]
    assert [r["optim/adam_lr"] for r in records] == pytest.approx(half, rel=1e-4)
    shown = capsys.readouterr().out
    assert "MFU" in shown and "xprof --port" in shown
    (trace,) = (tmp_path / "x" / "profile").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert any("train_step" in str(name) for name in names)


def test_old_records_are_still_summed_up():
    records = [{"step": 1, "train_loss": 2.0}, {"step": 2, "train_loss": 1.0}]
    records[1]["tokens_per_second"] = 1234.0
    val = {"val_loss": 1.5, "val_perplexity": 4.5, "val_bits_per_byte": 0.7}
    old = report.summary([*records, {"step": 2, **val}])
    records[1][metrics.TOKENS_PER_SECOND] = records[1].pop("tokens_per_second")
    assert report.summary([*records, {"step": 2, **val}]) == old
    assert "tokens/s         1,234" in old


def test_memory_is_that_of_the_fullest_device_and_absent_where_unknown():
    assert metrics.peak_memory() == {}  # of a CPU
    devices = [unittest.mock.Mock(**{"memory_stats.return_value": {"peak_bytes_in_use": n}})
               for n in (3, 7)]  # fmt: skip
    with unittest.mock.patch.object(jax, "local_devices", return_value=devices):
        assert metrics.peak_memory() == {"memory/peak_bytes_in_use": 7}


def test_a_line_of_progress_has_medians_since_the_last_line():
    display = Display(Console(file=io.StringIO()), 10)
    evaluation = Evaluation(1.0, math.e, 1.0)
    expected = {1: "7", 2: "70", 3: "7", 4: "100", 5: "1,050"}
    for step, rate in enumerate((7.0, 133.0, 7.0, 100.0, 2000.0), 1):
        figures = {"train_loss": 1.0, GRADIENT_NORM: 1.0, TOKENS_PER_SECOND: rate, MFU: rate}
        display.record(step, figures)
        assert f" {expected[step]} tokens/s" in display.status
        assert f"MFU {float(expected[step].replace(',', '')):.1f}%" in display.status
        if step == 3:
            display.record(step, evaluation.figures())


def test_rates_in_blocks_are_those_of_the_schedule():
    config, steps = OptimizerConfig(schedule="warmup_cosine"), 3 * RATES_AT_ONCE + 5
    found, peaks = LearningRates(config, steps), optimizers.rates(config)
    for update in (0, 1, RATES_AT_ONCE - 1, RATES_AT_ONCE, 2 * RATES_AT_ONCE + 7, steps - 1, 3):
        rate = float(optimizers.schedule(config, peaks.matrices, steps)(update))
        assert found.of(update)["optim/learning_rate"] == pytest.approx(rate, rel=1e-5, abs=1e-8)
    longest = LearningRates(OptimizerConfig(), 2**31 - 1)
    assert longest.of(2**31 - 2)["optim/learning_rate"] >= 0
    assert longest.block.shape == found.block.shape == (2, RATES_AT_ONCE)


def test_delayed_records_are_written_once(tmp_path):
    tx = omp.diagnostics.recorded(omp.muonplus, every=2)(0.1)
    params = {"up": {"kernel": jnp.eye(4, 8)}}
    states = [tx.init(params)]
    for _ in range(3):
        states.append(tx.update(params, states[-1], params)[1])
    own = unittest.mock.Mock(recorded=0)
    own.setup.config.optimizer.record_every = 2
    with Metrics(tmp_path / "matrices.jsonl", 0) as own.matrices:
        for step, updates in ((2, 0), (4, 2), (6, 3)):  # how many steps did update something
            state = TrainState(params, states[updates], jax.random.key(0))
            Recorder.record_matrices(own, step, state)
    records = read_metrics(tmp_path / "matrices.jsonl")
    assert [(record["step"], record["update"]) for record in records] == [(4, 2)]


# Batches that are read ahead


def test_batches_come_in_order_and_are_read_before_they_are_asked_for():
    read, third = [], threading.Event()

    def batch(step):
        read.append(step)
        if step == 5:
            third.set()
        return step * 10

    with prefetch(batch, range(3, 9)) as ahead:
        assert next(ahead) == 30
        assert third.wait(10)  # two more are read while nobody asks
        assert [next(ahead) for _ in range(5)] == [40, 50, 60, 70, 80]
        with pytest.raises(StopIteration):
            next(ahead)
    assert read == list(range(3, 9))


def test_leaving_early_ends_the_thread():
    before = threading.active_count()
    with prefetch(lambda step: step, range(10**9)) as ahead:
        assert next(ahead) == 0
    wait_for(lambda: threading.active_count() <= before)  # one of a test before may end too


def test_what_reading_raises_is_raised_where_the_batch_is_needed():
    def batch(step):
        if step == 1:
            raise OSError("the disk is gone")
        return step

    with prefetch(batch, range(5)) as ahead:
        assert next(ahead) == 0
        with pytest.raises(OSError, match="the disk is gone"):
            next(ahead)
