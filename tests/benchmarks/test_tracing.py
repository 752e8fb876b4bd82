"""`benchmarks.tracing` measures every stage, of the library that it is told to measure."""

import dataclasses
import json

import pytest

from benchmarks import tracing

TINY = tracing.Config(rounds=1, layers=1, width=16)


def test_main_writes_every_stage_of_every_update(tmp_path):
    tracing.main(dataclasses.replace(TINY, out=tmp_path))
    record = json.loads((tmp_path / "tracing-cpu.json").read_text())
    assert record["command"] == "python -m benchmarks.tracing --rounds 1 --layers 1 --width 16"
    assert list(record["seconds"]) == [
        "optax.contrib.muon, two leaves",
        "omp.muonplus, two leaves",
        "optax.contrib.muon, 1 layers",
        "omp.muonplus, 1 layers",
        "omp.muonplus, four matrices, float32",
        "omp.muonplus, four matrices, bfloat16",
        "omp.muonplus, 1 layers, sharding= for 4 x 2 devices",
    ]
    for stages in record["seconds"].values():
        assert list(stages) == ["trace", "lower", "compile"]
        assert all(len(values) == 1 and min(values) > 0 for values in stages.values())


def test_each_round_traces_anew():
    traced = []

    def make():
        tx = tracing.optax.sgd(0.1)

        def update(*args):
            traced.append(1)
            return tx.update(*args)

        return tracing.optax.GradientTransformation(tx.init, update)

    shapes = {"w": tracing.jax.ShapeDtypeStruct((2, 2), "float32")}
    case = tracing.Case(make, shapes)
    tracing.measure({"sgd": case}, 3)
    assert len(traced) == 4  # one round is not counted


def test_a_folder_without_the_library_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)  # which also restores the path afterwards
    with pytest.raises(ValueError, match="has no optax_muonplus"):
        tracing.cases(dataclasses.replace(TINY, library=tmp_path))


def test_compare_alternates_the_versions_and_keeps_their_seconds_apart(tmp_path, monkeypatch):
    measured = []

    def measure(options):
        measured.append(options[options.index("--library") + 1])
        return {"muonplus": {"trace": [float(len(measured))]}}

    monkeypatch.setattr(tracing, "measure_in_process", measure)
    ours, other = tracing.compare(dataclasses.replace(TINY, rounds=2), tmp_path)
    assert measured == 2 * [str(tracing.ROOT), str(tmp_path)]
    assert ours == {"muonplus": {"trace": [1.0, 3.0]}}
    assert other == {"muonplus": {"trace": [2.0, 4.0]}}
