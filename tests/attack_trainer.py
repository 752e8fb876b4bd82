"""Kills, fills and flips runs of the trainer at random moments, and says what came of it.

    python -m tests.attack_trainer --rounds 20 --seed 1 [--only flip kill] [--of CHECKOUT]

First come the attacks that are always the same, then the random ones, so many rounds of them. Each
is a process of its own, of some seconds. The output is a table in Markdown; the exit status is 1
if an attack ended otherwise than it may. Attacks on disks need root, who may mount a tmpfs.
"""

import argparse
import inspect
import random
import sys
import tempfile
from pathlib import Path

from tests.support import attacks
from tests.support.attacks import Scene
from tests.support.attacks_at_random import RANDOM
from tests.support.attacks_one_by_one import FIXED

ROOT = Path(__file__).parent.parent


def main() -> int:
    """Runs the attacks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--of", type=Path, default=ROOT)
    asked = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as room:
        scene = Scene(asked.of.absolute(), Path(room), random.Random(asked.seed))
        scene.text.write_text(inspect.getsource(inspect), encoding="utf-8")
        make_base(scene)
        print("| attack | outcome | may be | last line |\n|---|---|---|---|", flush=True)
        for attack in (*FIXED, *RANDOM * asked.rounds):
            name = attack.__name__.replace("_", " ")
            if asked.only and not any(word in name for word in asked.only):
                continue
            allowed = attack.allowed
            word, line = attack(scene)
            wrong += word not in allowed
            mark = "" if word in allowed else "**"
            print(
                f"| {name} | {mark}{word}{mark} | {', '.join(allowed)} | {line[:160]} |", flush=True
            )
    print(f"\n{wrong} ended otherwise than they may")
    return 1 if wrong else 0


def make_base(scene: Scene) -> None:
    """Makes the run that attacks copy, with checkpoints of three steps."""
    folder = scene.room / "base" / "x"
    process = scene.start(*scene.new(folder.parent))
    word, line = attacks.outcome(process, folder, None)
    if word != "finished":
        raise SystemExit(f"the run without an attack ended in: {word}, {line}")
    scene.base = folder


if __name__ == "__main__":
    sys.exit(main())
