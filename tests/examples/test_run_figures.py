"""Figures of a run in `metrics.jsonl`, `--profile`, and batches that are read ahead."""

import dataclasses
import gzip
import io
import json
import math
import threading
import unittest.mock

import jax
import pytest
from rich.console import Console

from examples.trainer.data.placement import prefetch
from examples.trainer.runs import metrics, report
from examples.trainer.runs.metrics import GRADIENT_NORM, MFU, TOKENS_PER_SECOND, read_metrics
from examples.trainer.runs.progress import Display
from examples.trainer.settings import machines as machine_settings
from examples.trainer.settings.machines import MachineConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training.evaluate import Evaluation
from tests.support.trainer import STEPS, losses_are, train, wait_for

pytestmark = pytest.mark.usefixtures("one_device")

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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"profile": "5"}, "give the first and the last step to record"),
        ({"profile": "0:2"}, "give the first and the last step to record"),
        ({"profile": "7:3"}, "give the first and the last step to record"),
        ({"profile": "20:30"}, "beyond the last step, 24"),
        ({"peak_tflops": 0.0}, "--peak-tflops is 0.0: it should be greater than 0"),
    ],
)
def test_flags_about_the_machine_that_mean_nothing_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        machine_settings.check_machine(dataclasses.replace(MachineConfig(), **flags), STEPS)


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
