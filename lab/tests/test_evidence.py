"""The numbers of the pages, from the committed runs."""

import dataclasses
import functools
import json
import math
import re
import shlex
import shutil

import numpy as np
import pytest
from scipy import optimize, stats

from lab import contrasts as contrasts_command
from lab import steadiness
from lab.sweeps import contrasts, results
from lab.sweeps.results import MUON
from lab.tests.support.sweep_results import DEFAULT, rows, with_plain_signs
from tests.support.documents import ROOT

EXPERIMENTS = ROOT / contrasts_command.EXPERIMENTS


def table(page, head):
    """The rows of the table whose head begins so."""
    return rows(head + page.partition(head)[2].partition("\n\n")[0])


def interval(found, digits=3, sign="", factor=1):
    """An estimate as the pages write it, or its negative where they say "below" or "gained"."""
    return f"{factor * found.mean:{sign}.{digits}f} ± {found.half_width:.{digits}f}"


@pytest.mark.parametrize(
    "head, plans, last",
    [
        ("| model and text", {"pooled": "."}, [("69", "-0.0096 ± 0.0060")]),
        ("| 20 tokens per parameter", {"last": "last", "batch": "batch"}, []),
    ],
)
def test_tables_of_evidence_are_rounded_once_from_the_runs(head, plans, last):
    page = with_plain_signs("explain/evidence.md")
    written = [(row[1], row[3].strip("*")) for row in table(page, head)]
    found = [
        contrasts.measured(each, EXPERIMENTS / sweeps)
        for plan, sweeps in plans.items()
        for each in contrasts.read(EXPERIMENTS / plan / "contrasts.json")
    ]
    expected = [(str(each.seeds), interval(each, 4, "+")) for each in found]
    assert written == [*expected, *last]


ADAMW = ("optax.adamw", "its best rate", 0.0)


@functools.cache
def digits(task):
    """Losses by method, rate and second rate; AdamW's are those of its best rate."""
    folder, name = ROOT / "lab/results/benchmarks", f"digits-{task.lower()}-cpu.json"
    found = json.loads((folder / name).read_text())["rows"]
    losses = {(row["method"], row["rate"], row["second"]): row["losses"] for row in found}
    if (adamw := folder / "digits-adamw" / name).exists():
        tried = [row["losses"] for row in json.loads(adamw.read_text())["rows"]]
        losses[ADAMW] = min(tried, key=np.mean)
    return losses


def test_tables_of_digits_are_rounded_once_from_the_runs():
    ours, optax = "omp.muonplus", "optax.contrib.muon"
    pairs = [((ours, rate, 0.0), (optax, rate, 0.0)) for rate in (0.02, 0.04, 0.08)]
    pairs += [((ours, 0.04, second), (ours, 0.04, 0.0)) for second in (0.003, 0.01, 0.03)]
    pairs.append((ADAMW, (ours, 0.04, 0.0)))
    tasks, page = ("MLP", "CNN", "ViT"), with_plain_signs("howto/rates.md")
    written = [row[1:] for row in table(page, "| | MLP | CNN | ViT |")]
    for row, (one, other) in zip(written, pairs, strict=True):
        for cell, losses in zip(row, map(digits, tasks), strict=True):
            if one not in losses or other not in losses:
                assert not cell
                continue
            gaps = [x - y for x, y in zip(losses[one], losses[other], strict=True)]
            assert cell == interval(contrasts.estimate(gaps), sign="+")
    for task in tasks:
        line = page.partition(f"| {task} | ")[2].partition(" |\n")[0].replace("*", "")
        means = [np.mean(digits(task)[ours, 0.04, x]) for x in (0.0, 0.03, 0.01, 0.003)]
        assert line == " | ".join(f"{mean:.3f}" for mean in means)


def commands():
    """Words after `python -m lab.contrasts`, on pages of the site and in the table of evidence."""
    folders = {
        "$E": str(contrasts_command.EXPERIMENTS),
        "$S": "lab/results/benchmarks/yardsticks/tiny-shakespeare",
    }
    evidence = (ROOT / "docs/explain/evidence.md").read_text()
    found = re.findall(r"^\| .*?\| `(\$[ES]/.*?)` \|", evidence, re.M)
    assert len(found) > 12
    pages = "docs/explain/evidence.md", "docs/howto/rates.md", "lab/results/experiments/README.md"
    for page in pages:
        found += re.findall(r"^python -m lab.contrasts (.*)", (ROOT / page).read_text(), re.M)
    for name, folder in folders.items():
        found = [command.replace(name, folder) for command in found]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_pages_find_their_ledgers(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert contrasts_command.main(shlex.split(command, comments=True)) == 0
    shown = capsys.readouterr().out
    assert " ± " in shown and "has no runs" not in shown


@pytest.mark.parametrize("plan", ["last", "batch"])
@pytest.mark.parametrize(
    "page", ["README.md", "docs/choose.md", "lab/results/experiments/README.md"]
)
def test_pages_have_the_planned_tests_of_20_tokens(page, plan):
    line = contrasts.read(EXPERIMENTS / plan / "contrasts.json")[0]
    found = contrasts.measured(line, EXPERIMENTS / plan)
    assert f"{interval(found, 4)} above" in (ROOT / page).read_text()


def typed(file):
    lines = contrasts.read(EXPERIMENTS / "typed" / file)
    return {line.name: contrasts.measured(line, EXPERIMENTS / "typed") for line in lines}


def test_the_page_has_the_line_as_typed():
    page, found = with_plain_signs("explain/evidence.md"), typed("models.json")
    mean, gpt, llama = (
        found[f"{models}: muonplus less muon, as typed"] for models in ("both", "GPT", "LLaMA")
    )
    assert f"{interval(mean, 4, factor=-1)}** below" in page
    assert f"has {interval(gpt)}" in page and f"LLaMA {interval(llama)}" in page
    choose = (ROOT / "docs/choose.md").read_text()
    assert f"a GPT gained {interval(gpt, factor=-1)}" in choose
    assert f"a LLaMA {interval(llama, factor=-1)}" in choose


def test_the_pages_have_what_to_add_to_the_line():
    """Each row of the table is one arm less another; the pages say some of it in words."""
    found = typed("models.json")
    arms = ["fall less typed", "matrices less typed", "decay less typed", "clip less decay"]
    arms += ["schedule less clip", "schedule less fall", "tuned less typed"]
    page = with_plain_signs("howto/rates.md")
    for row, arm in zip(table(page, "| added | to |"), arms, strict=True):
        models = [found[f"{model}: {arm}"] for model in ("GPT", "LLaMA")]
        assert row[2:4] == [interval(each, sign="+") for each in models]
        assert row[4] == str(models[0].seeds) == str(models[1].seeds)
    fall, beside = found["both: fall less typed"], interval(found["both: schedule less fall"])
    lower = interval(found["both: typed at 0.014 less at 0.02"], factor=-1)
    against = interval(found["both: fall less typed at 0.014"], factor=-1)
    assert f"on average ({interval(found['both: tuned less fall'], sign='+')})" in page
    assert f"everything ends {interval(found['GPT: tuned less fall'])} higher" in page
    assert f"({beside} on average)" in page
    assert f"0.014 ends {lower} lower than 0.02. Against it the schedule gives {against}" in page
    for page in ("docs/choose.md", "docs/explain/evidence.md", "lab/results/experiments/README.md"):
        assert interval(fall, factor=-1) in (ROOT / page).read_text()
    assert f"saved both {-fall.mean:.1f} nats" in (ROOT / "README.md").read_text()
    page = with_plain_signs("howto/weight_decay.md")
    assert f"of the matrices cost {interval(found['both: matrices less typed'])} nats" in page
    assert f"of all parameters cost {interval(found['both: decay less typed'])}" in page
    assert f"by {beside}" in page


def test_the_plan_has_what_its_lines_print():
    plan = (EXPERIMENTS / "typed" / "hypotheses.md").read_text().replace("\N{MINUS SIGN}", "-")
    for name, found in typed("contrasts.json").items():
        assert interval(found, 3 if found.half_width > 0.02 else 4, "+") in plan, name
    assert plan.count("| better |") == plan.count("| worse |") == 1


def test_the_pooled_gain_of_the_committed_runs(monkeypatch, capsys):
    """The sentence of README: seven pairs of model and text, 69 seeds."""
    monkeypatch.chdir(ROOT)
    assert contrasts_command.main(["--pooled"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "7 lines, 69 seeds: -0.00956 ± 0.00596, p 0.0078; below zero in 7;" in last


def test_the_page_has_the_verdicts_of_the_committed_runs(tmp_path):
    page = with_plain_signs("howto/rates.md")
    shutil.copytree(ROOT / steadiness.STEADIER, tmp_path / "runs")  # it is written to
    cells = steadiness.read(tmp_path / "runs")
    exact = dataclasses.replace(MUON, ortho="polar_express-8")
    for other, steadier in ((MUON, False), (exact, True)):
        for rate in (4, 8):
            found = steadiness.verdict(cells[DEFAULT, rate], cells[other, rate])
            assert found.steadier == steadier
            assert interval(found.lost) in page


MODELS = "gpt", "llama"


def gap_at_fitted_rates(runs):
    """Default minus Muon at the lowest points of fitted parabolas in log rate, mean of both models.

    The four cells share one curvature, and the runs of a model and seed one random effect, whose
    share of the variance has the highest restricted likelihood.
    """
    cells = [(model, method) for model in MODELS for method in (MUON, DEFAULT)]
    x, y = np.zeros((len(runs), 9)), np.array([loss for *_, loss in runs])
    for row, (model, method, rate, _, _) in zip(x, runs, strict=True):
        cell = cells.index((model, method))
        row[cell], row[4 + cell], row[8] = 1, math.log(rate), math.log(rate) ** 2
    groups = [(model, seed) for model, _, _, seed, _ in runs]
    same = np.array([[a == b for b in groups] for a in groups])
    free = len(y) - 9

    def fit(share):
        root = np.linalg.cholesky(np.where(same, share, 0) + (1 - share) * np.eye(len(y)))
        q, r = np.linalg.qr(np.linalg.solve(root, x))
        whitened = np.linalg.solve(root, y)
        coefficients = np.linalg.solve(r, q.T @ whitened)
        variance = np.sum(np.square(whitened - q @ (q.T @ whitened))) / free
        inverse = np.linalg.inv(r)
        determinants = np.log(np.abs(np.concatenate([np.diag(root), np.diag(r)]))).sum()
        criterion = free * np.log(variance) + 2 * determinants
        return criterion, coefficients, variance * inverse @ inverse.T

    best = optimize.minimize_scalar(lambda share: fit(share)[0], bounds=(0, 0.99), method="bounded")
    _, b, covariance = fit(best.x)
    sign, at = np.array([-0.5, 0.5, -0.5, 0.5]), -b[4:8] / (2 * b[8])  # at: log rates
    gap = sign @ (b[:4] - b[8] * at**2)
    slope = np.concatenate([sign, sign * at, [sign @ at**2]])
    half = stats.t.ppf(0.975, free) * math.sqrt(slope @ covariance @ slope)
    return gap, half


def test_the_page_has_the_difference_at_fitted_rates_and_what_the_batch_changes():
    page = with_plain_signs("explain/evidence.md")
    runs = [
        (model, trial.method, trial.rate, trial.seed, run.loss)
        for model in MODELS
        for trial, run in results.read(EXPERIMENTS / "last" / model).results.items()
    ]
    gap, half = gap_at_fitted_rates(runs)
    assert f"all {len(runs)} runs" in page and f"{gap:+.4f} ± {half:.4f}" in page
    batch = contrasts.read(EXPERIMENTS / "batch" / "contrasts.json")[0]
    found = contrasts.measured(batch, EXPERIMENTS / "batch")
    assert f"{found.mean - gap:+.3f} ± {math.hypot(found.half_width, half):.3f}" in page


def test_the_page_has_the_four_seeds_of_the_default_at_a_high_rate():
    muon = results.read(EXPERIMENTS / "batch" / "gpt-rates").losses(MUON, 0.08)
    high = results.read(EXPERIMENTS / "batch" / "gpt-high").losses(DEFAULT, 0.08)
    *level, last = sorted(high[seed] - muon[seed] for seed in range(200, 204))
    assert np.abs(level).max() < 0.015
    sentence = f"three are level with Muon, one ends {last:.2f} higher"
    assert sentence in with_plain_signs("explain/evidence.md")


def test_the_page_has_muons_best_rates_at_two_batches():
    page = with_plain_signs("howto/rates.md")
    for model in MODELS:
        one = results.read(EXPERIMENTS / "last" / model).best_rate(MUON)
        eight = results.read(EXPERIMENTS / "batch" / f"{model}-rates").best_rate(MUON)
        assert f"rose from {one:g} to {eight:g}" in page


@pytest.mark.parametrize("plan", ["batch", "last", "steadier", "typed"])
def test_a_plan_names_the_texts_of_its_ledgers(plan):
    named = re.findall(r"\b[0-9a-f]{16}\b", (EXPERIMENTS / plan / "hypotheses.md").read_text())
    settings = list((EXPERIMENTS / plan).glob("*/sweep.json"))
    assert settings and {json.loads(each.read_text())["data"] for each in settings} <= set(named)
