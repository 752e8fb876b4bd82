"""The measures of behaviour above the best rate, on made-up runs."""

import dataclasses
import json
import math

import numpy as np
import pytest

from lab import steadiness
from lab.steadiness import Run, Steps
from lab.sweeps.grid import Trial
from lab.sweeps.ledger import Ledger
from lab.sweeps.results import MUON
from lab.tests.support.sweep_results import PLUS, result


def records(losses):
    return [
        {"step": i, "train_loss": loss, "grad/norm/total": float(i)}
        for i, loss in enumerate(losses, 1)
    ]


def test_spikes_are_steps_above_the_median_of_the_twenty_before():
    losses = np.full(100, 3.0)
    losses[10] = 9.0  # among the first 50 steps
    losses[60], losses[70] = 3.11, 3.09
    found = steadiness.measured([*records(losses), {"step": 101, "skipped": 1}])
    assert found.spikes == 2
    assert found.gradient == pytest.approx(np.percentile(np.arange(51, 101), 99.9))


def test_a_run_crosses_when_it_falls_below_after_it_was_above():
    run = steadiness.compared(result(5.0, 3.9, 4.0, 2.9), result(4.0, 4.0, 3.5, 3.0), Steps(0, 1.0))
    assert (run.crossings, run.lost) == (2, pytest.approx(-0.1))


def pairs(lost, spikes):
    return {
        ("gpt", seed): Run(Steps(s, 1.0), x, 0)
        for seed, (x, s) in enumerate(zip(lost, spikes, strict=True))
    }


def test_steadier_is_less_lost_and_not_more_spikes():
    noise = np.linspace(-0.01, 0.01, 16)
    base = pairs(0.1 + noise, [1] * 16)
    verdict = steadiness.verdict(pairs(0.05 - noise, [1] * 16), base)
    assert verdict.steadier
    assert verdict.lost.mean == pytest.approx(-0.05)
    spiking = steadiness.verdict(pairs(0.05 - noise, [2] * 16), base)
    assert spiking.more_spikes == pytest.approx(0.5**16)
    assert not spiking.steadier
    assert not steadiness.verdict(pairs(0.095 - noise / 10, [1] * 16), base).steadier  # by 0.005
    diverged = pairs([math.inf] * 16, [1] * 16)
    assert not steadiness.verdict(diverged, base).steadier


def test_measures_of_steps_outlive_the_folders_of_runs(tmp_path):
    sweep = tmp_path / "gpt"
    sweep.mkdir()
    for method in (MUON, PLUS):
        for rate in (0.01, 0.04):
            trial = Trial(method, rate, 0)
            folder = sweep / "runs" / trial.name
            folder.mkdir(parents=True)
            lines = [json.dumps(r) + "\n" for r in records(np.full(60, 3.0))]
            (folder / "metrics.jsonl").write_text("".join(lines))
            Ledger(sweep).add(trial, dataclasses.replace(result(4.0, 3.0 + rate)))
    first = steadiness.write(tmp_path)
    for trial in Ledger(sweep).results():
        (sweep / "runs" / trial.name / "metrics.jsonl").unlink()
    assert steadiness.write(tmp_path) == first
    assert "| Muon | 4 | 1 | 0.03 | 0 |" in first
    assert "against Muon |" in first
