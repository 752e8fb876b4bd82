"""Attacks that are the same every time. Each gets a scene and returns how the trainer ended."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.attacks import LAST, Scene, disk, fill, outcome, wait_for

FIXED: list[Any] = []
Outcome = tuple[str, str]


def attack(*allowed: str) -> Callable[[Any], Any]:
    """Lists an attack, with the outcomes that it may have."""

    def add(function: Any) -> Any:
        function.allowed = allowed
        FIXED.append(function)
        return function

    return add


def resumed(scene: Scene, folder: Path) -> Outcome:
    return outcome(scene.start("--resume", str(folder)), folder, scene.base)


def edited(name: str, file: str, change: Callable[[bytes], bytes], *allowed: str) -> None:
    """Lists an attack that changes a file of a stopped run."""

    def function(scene: Scene) -> Outcome:
        folder = scene.stopped()
        path = folder / file
        path.write_bytes(change(path.read_bytes()))
        return resumed(scene, folder)

    function.__name__ = name
    attack(*allowed)(function)


def config(section: str, key: str, value: Any) -> Callable[[bytes], bytes]:
    """A change of config.json."""

    def change(content: bytes) -> bytes:
        written = json.loads(content)
        (written["config"][section] if section else written["config"])[key] = value
        return json.dumps(written).encode()

    return change


METRICS = "metrics.jsonl"
edited("metrics end in zero bytes", METRICS, lambda b: b + bytes(4096), "finished")
edited("metrics end in half a line", METRICS, lambda b: b + b'{"step": 17, "tr', "finished")
edited("metrics are binary", METRICS, lambda b: os.urandom(4096) + b"\n", "sentence")
edited("metrics: garbage in the middle", METRICS, lambda b: b[:900] + b"\x07" + b[901:], "sentence")
edited("metrics: a line without step", METRICS, lambda b: b + b'{"train_loss": 1}\n', "sentence")
edited("metrics: a line that is a list", METRICS, lambda b: b + b"[1]\n", "sentence")
edited(
    "metrics: a loss that is text",
    METRICS,
    lambda b: b + b'{"step": 1, "train_loss": "a"}\n',
    "sentence",
)
edited("metrics: nested too deeply", METRICS, lambda b: b + b"[" * 100_000 + b"\n", "sentence")
edited("metrics: an empty line", METRICS, lambda b: b"\n" + b, "finished", "sentence")
edited("config: steps is text", "config.json", config("", "steps", "many"), "sentence")
edited("config: seed is null", "config.json", config("", "seed", None), "sentence")
edited("config: unknown optimizer", "config.json", config("optimizer", "name", "sgd"), "sentence")
edited("config: a section is null", "config.json", config("", "model", None), "sentence")
edited("config: a section is a list", "config.json", config("", "data", [1]), "sentence")
edited("config: beta 2", "config.json", config("optimizer", "beta", 2), "sentence")
MANIFEST = "checkpoints/16/state/manifest.ocdbt"
edited("damaged manifest", MANIFEST, lambda b: b[:40] + b"\0" * 20 + b[60:], "sentence")


@attack("sentence")
def a_flipped_bit_of_an_array(scene: Scene) -> Outcome:
    folder = scene.stopped()
    path = max(folder.glob("checkpoints/16/state/ocdbt*/d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)
    return resumed(scene, folder)


@attack("sentence")
def metrics_is_a_folder(scene: Scene) -> Outcome:
    folder = scene.stopped()
    (folder / METRICS).unlink()
    (folder / METRICS).mkdir()
    return resumed(scene, folder)


@attack("sentence")
def a_name_that_is_too_long(scene: Scene) -> Outcome:
    return outcome(scene.start(*scene.new(scene.room, "x" * 300)), scene.room, None)


def flags(name: str, *words: str) -> None:
    """Lists an attack with flags that make no sense."""

    def function(scene: Scene) -> Outcome:
        root = scene.room / "flags"
        found = outcome(scene.start(*scene.new(root, name, *words)), root, None)
        if found[0] == "sentence" and (root / name).exists():
            return "sentence after the run", found[1]
        return found

    function.__name__ = f"flags {' '.join(words)}"
    attack("sentence")(function)


flags("a", "--seed", "-1")
flags("b", "--seed", str(2**32))
flags("c", "--optimizer.learning-rate", "nan")
flags("d", "--optimizer.adam-learning-rate", "inf")
flags("e", "--optimizer.learning-rate", "-0.1")
flags("f", "--optimizer.adam-b1", "1")
flags("g", "--optimizer.adam-b2", "2", "--optimizer.name", "adamw")
flags("h", "--optimizer.clip-norm", "0")
flags("i", "--optimizer.weight-decay", "nan")
flags("j", "--optimizer.beta", "1")
flags("k", "--optimizer.ns-steps", "9", "--optimizer.ns-coeffs", "you")


@attack("sentence after the run", "sentence")
def a_rate_with_which_it_diverges(scene: Scene) -> Outcome:
    root = scene.room / "diverges"
    rates = ("--optimizer.learning-rate", "1e30", "--optimizer.adam-learning-rate", "1e30")
    return outcome(scene.start(*scene.new(root, "x", *rates, "--max-skipped", "99")), root, None)


def on_disk(name: str, options: str, then: Callable[[Path], None], finished: bool) -> None:
    """Lists an attack in which a run resumes on a disk that something has happened to."""

    def function(scene: Scene) -> Outcome:
        with disk(scene.room, options) as place:
            folder = scene.stopped(place)
            if finished:
                assert scene.base is not None
                shutil.copytree(
                    scene.base / "checkpoints", folder / "checkpoints", dirs_exist_ok=True
                )
            then(place)
            return resumed(scene, folder)

    function.__name__ = name
    attack("sentence", "finished")(function)


def read_only(place: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)


def use_inodes(place: Path) -> None:
    with contextlib.suppress(OSError):
        for number in range(1000):
            (place / f"filler-{number}").touch()


on_disk("resume on a full disk", "size=4m", fill, False)
on_disk("a finished run on a full disk", "size=4m", fill, True)
on_disk("resume on a read-only mount", "size=4m", read_only, False)
on_disk("resume without inodes left", "size=16m,nr_inodes=200", use_inodes, False)


@attack("sentence")
def a_new_run_on_a_full_disk(scene: Scene) -> Outcome:
    with disk(scene.room, "size=4m") as place:
        fill(place)
        found = outcome(scene.start(*scene.new(place)), place, None)
        return ("leaves a folder", found[1]) if (place / "x").exists() else found


def removed_while_running(name: str, what: str, after: str) -> None:
    def function(scene: Scene) -> Outcome:
        folder = scene.stopped()
        process = scene.start("--resume", str(folder))
        wait_for(lambda: LAST - 6 in steps_of(folder), process)
        shutil.rmtree(folder / what, ignore_errors=True)
        return outcome(process, folder, scene.base)

    function.__name__ = name
    attack("sentence", *after.split())(function)


def steps_of(folder: Path) -> set[int]:
    try:
        lines = (folder / METRICS).read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split('"step": ')[1].split(",")[0]) for line in lines if '"step": ' in line}


removed_while_running("checkpoints removed while running", "checkpoints", "")
removed_while_running("old checkpoints removed while running", "checkpoints/8", "finished")
removed_while_running("run folder removed while running", "", "")


@attack("sentence")
def two_processes_resume_one_run(scene: Scene) -> Outcome:
    folder = scene.stopped()
    first = scene.start("--resume", str(folder))
    wait_for(lambda: LAST - 6 in steps_of(folder), first)
    first.send_signal(signal.SIGSTOP)  # it is slow, and not dead
    try:
        return outcome(scene.start("--resume", str(folder)), folder, scene.base)
    finally:
        first.kill()
        first.communicate()


@attack("stopped", "finished")
def two_ctrl_c_in_a_row(scene: Scene) -> Outcome:
    folder = scene.stopped()
    process = scene.start("--resume", str(folder))
    wait_for(lambda: LAST - 6 in steps_of(folder), process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    return outcome(process, folder, scene.base)
