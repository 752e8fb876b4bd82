"""`benchmarks.recipes`: the table of recipes from what `--compile-for` has written."""

from benchmarks import recipes

GB = 10**9


def record(**changes):
    collectives = {"all-gather bf16": {"count": 3, "received_bytes": 5 * GB}}
    estimate = {"step_s": 36.0, "mfu": 0.4, "optimizer_share": 0.01}
    return {
        "fits": True,
        "device_bytes": 80 * GB,
        "flops_per_device": 101.0,
        "flops_even_share": 100.0,
        "collectives": collectives,
        "estimate": estimate,
        "rows_of_a_device": 8,
        "config": {"accumulate": 64, "steps": 1000},
        "programs": {
            "train_step": {"peak_bytes": 20 * GB},
            "evaluation": {"peak_bytes": 2 * GB},
            "init": {"peak_bytes": GB, "output_bytes": 4 * GB},
        },
        **changes,
    }


def test_a_row_has_the_largest_program_and_the_time_of_the_whole_run():
    assert recipes.cells(record()) == [
        *("8 x 64", "4.00", "20.0", "25%", "1.010", "3", "5.0 GB", "36.00 s", "40%", "1.0%", "10 h")
    ]
    assert recipes.cells(record(collectives={}))[5:7] == ["0", "0.0 GB"]
    assert [recipes.in_words(3600 * h) for h in (1.5, 3, 240)] == ["90 min", "3 h", "10 days"]
    assert recipes.cells(record(estimate=None)) == ["8 x 64", "4.00", "20.0", "25%"]
    assert recipes.cells(record(fits=None))[-1] == "unknown"
