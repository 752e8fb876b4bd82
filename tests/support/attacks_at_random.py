"""Attacks at random moments or places. Each gets a scene and returns how the trainer ended."""

import contextlib
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.support.attacks import LAST, Scene, disk, fill, outcome, wait_for

Outcome = tuple[str, str]


def flip(scene: Scene) -> Outcome:
    """Flips a bit of any file of a checkpoint, which is refused unless nothing depends on it."""
    folder = scene.stopped()
    path, content = any_file(scene, folder)
    place = scene.random.randrange(len(content))
    content[place] ^= 1 << scene.random.randrange(8)
    path.write_bytes(content)
    word, line = resumed(scene, folder)
    return word, f"{path.relative_to(folder)}: {line}"


def cut(scene: Scene) -> Outcome:
    """Cuts off the end of any file of a checkpoint, or all of it."""
    folder = scene.stopped()
    path, content = any_file(scene, folder)
    path.write_bytes(content[: scene.random.randrange(len(content))])
    word, line = resumed(scene, folder)
    return word, f"{path.relative_to(folder)}: {line}"


def zero(scene: Scene) -> Outcome:
    """Fills any file of a checkpoint with zero bytes from some place on, as a power cut does."""
    folder = scene.stopped()
    path, content = any_file(scene, folder)
    place = scene.random.randrange(len(content))
    path.write_bytes(content[:place] + bytes(len(content) - place))
    word, line = resumed(scene, folder)
    return word, f"{path.relative_to(folder)}: {line}"


def kill(scene: Scene) -> Outcome:
    """Kills a run at any moment; the run that resumes must have the losses of an unharmed one."""
    folder, process = saving(scene)
    process.kill()
    process.communicate()
    return resumed(scene, folder)


def ctrl_c(scene: Scene) -> Outcome:
    """Up to three Ctrl-C in a row at any moment; the process ends soon, and its run resumes."""
    folder, process = saving(scene)
    for _ in range(scene.random.randint(2, 3)):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        time.sleep(scene.random.choice([0, 0.01, 0.1]))
    word, line = outcome(process, folder, None)
    if word not in ("stopped", "finished"):
        return word, line
    return resumed(scene, folder)


def full(scene: Scene) -> Outcome:
    """Fills the disk at any moment; when there is room again the run resumes."""
    with disk(scene.room, "size=6m") as place:
        folder, process = saving(scene, place)
        fill(place)
        word, line = outcome(process, folder, None)
        if word not in ("sentence", "finished"):
            return word, line
        for filler in place.glob("filler*"):
            filler.unlink()
        return resumed(scene, folder)


def saving(scene: Scene, root: Path | None = None) -> tuple[Path, "subprocess.Popen[str]"]:
    """A run that saves often, at a moment between its first step and its end."""
    scene.copies += 1
    root = root or scene.room / f"saving-{scene.copies}"
    folder = root / "x"
    process = scene.start(*scene.new(root, "x", "--checkpoint-every", "1"))
    step = scene.random.randint(1, LAST)
    wait_for(lambda: (folder / "checkpoints" / str(step)).exists(), process)
    time.sleep(scene.random.random() * 0.1)
    return folder, process


def any_file(scene: Scene, folder: Path) -> tuple[Path, bytearray]:
    """A file of the newest checkpoint; the larger, the likelier, but for half of the draws."""
    files = [p for p in sorted((folder / "checkpoints/16").rglob("*")) if p.is_file()]
    files = [p for p in files if p.stat().st_size]
    sizes = [p.stat().st_size if scene.random.random() < 0.5 else 1 for p in files]
    path = scene.random.choices(files, sizes if max(sizes) > 1 else None)[0]
    return path, bytearray(path.read_bytes())


def resumed(scene: Scene, folder: Path) -> Outcome:
    found = outcome(scene.start("--resume", str(folder)), folder, scene.base)
    shutil.rmtree(folder, ignore_errors=True)
    return found


for function, allowed in {
    flip: ("sentence", "finished"),
    cut: ("sentence", "finished"),
    zero: ("sentence", "finished"),
    kill: ("finished",),
    ctrl_c: ("finished",),
    full: ("finished",),
}.items():
    function.allowed = allowed  # ty: ignore[unresolved-attribute]

RANDOM: list[Any] = [flip, cut, zero, kill, ctrl_c, full]
