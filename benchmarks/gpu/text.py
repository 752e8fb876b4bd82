"""The text of the training comparison: the sources of the packages that are installed."""

import argparse
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from benchmarks.gpu.settings import TOY, Settings
from examples.trainer.data.cache import Dataset, cache_folder
from examples.trainer.data.prepare import prepare
from examples.trainer.settings.run import DataConfig
from examples.trainer.system.files import write_atomically

LONGEST = 400_000  # bytes of a file; longer ones are tables rather than code


def collect(folder: Path, size: int) -> bytes:
    """Sources below ``folder`` as lines of JSON, each text once, up to ``size`` bytes of text."""
    lines = []
    seen = set()
    for path in sources(folder):
        content = path.read_bytes()
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        if text in seen:
            continue
        seen.add(text)
        lines.append(json.dumps({"text": text}))
        size -= len(content)
        if size <= 0:
            break
    return "\n".join(lines).encode()


def sources(folder: Path) -> Iterable[Path]:
    """Python files, in an order that does not depend on the file system."""
    for path in sorted(folder.rglob("*.py")):
        if path.is_file() and 0 < path.stat().st_size <= LONGEST:
            yield path


def data_config(settings: Settings) -> DataConfig:
    """The text as the trainer reads it."""
    file = cache_folder() / f"sources-{settings.text_bytes}.jsonl"
    return DataConfig(
        paths=(str(file),), max_bytes=2 * settings.text_bytes, vocab_size=settings.vocabulary
    )


def tokens(settings: Settings) -> Dataset:
    """The tokens, from the cache if they were made before."""
    config = data_config(settings)
    file = Path(config.paths[0])
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(sysconfig.get_path("purelib"))
        write_atomically(file, collect(folder, settings.text_bytes))
    return prepare(config, print)


def start(toy: bool) -> subprocess.Popen[bytes]:
    """Makes the tokens in a process of its own, which needs no device."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.text", *["--toy"] * toy], stdout=subprocess.DEVNULL
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="a few pages")
    dataset = tokens(TOY if parser.parse_args().toy else Settings())
    print(f"{dataset.train.meta.tokens} tokens")
