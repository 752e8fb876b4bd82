"""Twenty ends of a run, each in a process of its own, and each resumed to the same bits.

`python -m tests.examples.test_ends ROOT` does all twenty; the test does four of them.
"""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.trainer import PATIENCE, STEPS, TOY, losses, run_shell

WAYS = ("killed in a save", "killed between", "SIGTERM", "Ctrl-C twice")


def saving(folder):
    """Whether a checkpoint is being written."""
    places = folder / "checkpoints"
    return places.exists() and any("orbax-checkpoint-tmp" in name for name in os.listdir(places))


def last_step(folder):
    return max(losses(folder), default=0) if (folder / "metrics.jsonl").exists() else 0


def end(process, folder, way, step):
    """Ends a run after a step, in one of the ways; returns whether it was still going."""
    deadline = time.monotonic() + PATIENCE
    in_save = way == WAYS[0]
    while last_step(folder) < step or (saving(folder) != in_save and way in WAYS[:2]):
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline
        time.sleep(0.001)
    if way in WAYS[:2]:
        process.kill()
    else:
        process.send_signal(signal.SIGTERM if way == "SIGTERM" else signal.SIGINT)
        if way == "Ctrl-C twice":
            time.sleep(0.05)
            process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    return True


def run_and_end(text, root, name, ends):
    """A run that is ended in some ways after some steps, and then goes on to its last step."""
    folder = root / name
    flags = [*TOY, "--data.paths", str(text), "--runs-dir", str(root), "--name", name]
    command = [*flags, "--checkpoint-every", "1"]
    for way, step in ends:
        assert end(run_shell(*command), folder, way, step), (way, step)
        command = ["--resume", str(folder)] if (folder / "config.json").exists() else command
    process = run_shell(*command)
    shown, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, shown
    return folder


@pytest.mark.usefixtures("one_device")
def test_ends_of_every_kind_resume_to_the_same_bits(tmp_path, text):
    whole = run_and_end(text, tmp_path, "whole", [])
    ended = run_and_end(text, tmp_path, "ended", zip(WAYS, (3, 9, 14, 19), strict=True))
    for kind in ("train_loss", "val_loss", "grad/norm/total"):
        assert losses(ended, kind) == losses(whole, kind)
    assert not list((ended / "checkpoints").glob("*tmp*"))


def main(root):
    """Does twenty ends in five runs, and says of each whether its losses are those of the whole."""
    text = root / "own.txt"
    text.write_bytes(Path(subprocess.__file__).read_bytes())
    whole = run_and_end(text, root, "whole", [])
    for i in range(5):
        ways = itertools.islice(itertools.cycle(WAYS), i, i + 4)
        ends = list(zip(ways, sorted((2 + i, 7 + i, 12 + i, 17 + i)), strict=True))
        ended = run_and_end(text, root, f"ended-{i}", ends)
        same = all(losses(ended, k) == losses(whole, k) for k in ("train_loss", "val_loss"))
        print(f"{ended.name}: {ends}: {'the same bits' if same else 'DIFFERENT'}", flush=True)
    print(f"{STEPS} steps each")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
