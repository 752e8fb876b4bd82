"""`benchmarks.tracing` traces anew in each round, and alternates the versions it compares."""

import dataclasses

from benchmarks import tracing

TINY = tracing.Config(rounds=1, layers=1, width=16)


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
