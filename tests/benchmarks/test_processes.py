"""`benchmarks.processes`: what it says of processes that fail or hang, without the trainer."""

import time

import pytest

from benchmarks import processes, trainer_processes

WORDS = """
I1123 17:41:51.970985   18894 a.cc:289] nothing
F1123 17:41:51.971024   18894 client.h:80] Terminating process because of an end
error (process 1): a message
"""


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """A trial whose processes run a program of the test in place of the trainer."""
    group = []

    def of(program, patience=60.0, minutes=10.0):
        def start(arguments, log):
            group.append(trainer_processes.start(["-c", program], log))
            return group[-1]

        monkeypatch.setattr(processes, "start", start)
        config = processes.Config(patience=patience, minutes=minutes)
        return processes.Trial(config, tmp_path, time.monotonic() + 60 * minutes)

    yield of
    assert all(process.poll() is not None for process in group)


@pytest.mark.parametrize(
    ("program", "patience", "problem"),
    [
        ("raise SystemExit(3)", 60.0, "step 15 did not come; statuses"),
        ("import time; time.sleep(600)", 0.1, "step 15 did not come; statuses [None, None]"),
    ],
)
def test_what_does_not_come_is_a_row_that_says_so(trial, tmp_path, program, patience, problem):
    row = trial(program, patience).attempt(tmp_path / "x", 2, "killed")
    assert problem in row["problem"] and row["reached"] == row["lost"] == 0
    assert "step 15" in processes.columns.table([row], processes.COLUMNS)


def test_statuses_are_checked_and_nothing_begins_after_the_time_is_over(trial, tmp_path):
    failed = trial("raise SystemExit(3)").attempt(tmp_path / "x", 2, "undisturbed")
    assert failed["problem"] == "wrong status" and failed["statuses"] == [3, 3]
    late = trial("", minutes=-1.0).attempt(tmp_path / "x", 2, "killed")
    assert late["problem"] == "not begun within -1 minutes"


def test_the_trainers_own_message_comes_first(tmp_path):
    (tmp_path / "log").write_text(WORDS)
    logs = [tmp_path / "log"]
    assert trainer_processes.said(logs) == "error (process 1): a message"
    (tmp_path / "log").write_text(WORDS.replace("error (", "("))
    found = trainer_processes.shortened(trainer_processes.said(logs))
    assert found == "Terminating process because of an end"
    assert trainer_processes.said([]) == ""
