"""Tokenizes many files in many processes: an output for each file, so that a stop loses one each.

A folder that was prepared has `plan.json` (what all files have in common), `tokenizer.json`, and
for each file a folder in `parts` with its shards and, when it is complete, `meta.json`. When all
are, `parts.json` names them; then `--data.source prepared --data.paths FOLDER` reads them.
"""

import functools
import json
import multiprocessing
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field

from examples.trainer.data import cache, corpus, tokenizer
from examples.trainer.data.files import texts
from examples.trainer.data.hub import is_held_out
from examples.trainer.data.shards import Writer
from examples.trainer.settings.validation import STRICT, Count
from examples.trainer.system.errors import DamagedFileError, UserError
from examples.trainer.system.files import write_atomically

PLAN = "plan.json"


@dataclass(frozen=True)
class Preparation:
    """Tokenizes files for runs with --data.source prepared --data.paths OUT."""

    __pydantic_config__ = STRICT

    out: Path
    """Folder for the tokens; the same command continues in it, with the files that are left."""
    paths: tuple[str, ...]
    """Text files, or folders searched for .txt, .md, .py, .jsonl, .ndjson and .parquet."""
    tokenizer: str
    """gpt2, llama2 or a tokenizer.json."""
    text_field: str = "text"
    """Where the rows of .jsonl and .parquet files have their text; each row is a document."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.001
    """Share of the documents that is held out for validation, by the hash of their text."""
    workers: Count = 1
    """Processes on this machine, one file each at a time."""
    part: Annotated[str, tyro.conf.arg(metavar="I/N")] = "1/1"
    """Which share of the files this command takes, as 3/16; for jobs on several machines."""


def prepare_files(asked: Preparation, say: Callable[[str], None]) -> None:
    """Tokenizes the files of a part that are not done; the last part names all of them."""
    inputs = named(asked.paths)
    number, parts = part_of(asked.part)
    with cache.writing(asked.out):
        keep_plan(asked)
        (asked.out / "parts").mkdir(exist_ok=True)
    own = sorted(inputs)[number - 1 :: parts]
    left = [name for name in own if not is_done(asked.out, name, inputs[name])]
    say(f"{len(left)} of {len(own)} files to tokenize, with {asked.workers} workers")
    os.environ["RAYON_NUM_THREADS"] = "1"  # of the tokenizer: there is a process for each core
    work = functools.partial(tokenize, asked)
    # Spawned: a copy of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    workers = min(asked.workers, max(1, len(left)))
    with ProcessPoolExecutor(workers, context, initializer=end_with_parent) as pool:
        waiting = {pool.submit(work, name, inputs[name]): name for name in left}
        try:
            for done in as_completed(waiting):
                say(f"  {inputs[waiting[done]]}: {done.result():,} tokens")
        except BrokenProcessPool:
            raise UserError(
                "a worker was ended from outside, as happens to processes that need too much"
                " memory. The files that are complete are kept: give fewer --workers, or smaller"
                " files."
            ) from None
        except BaseException:  # what is running is finished, and nothing else is begun
            pool.shutdown(cancel_futures=True)
            raise
    finish(asked, inputs, say)


def end_with_parent() -> None:
    """Ends this process with the one that has started it, whatever ends that one."""
    if parent := multiprocessing.parent_process():
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def is_done(out: Path, name: str, path: Path) -> bool:
    """Whether a part is complete and its file was not written since."""
    folder = out / "parts" / name
    try:
        complete = cache.is_complete(folder, alone=False)
        return complete and cache.read_meta(folder).modified in (None, path.stat().st_mtime_ns)
    except DamagedFileError:
        return False


def named(paths: tuple[str, ...]) -> dict[str, Path]:
    """The files by the names of their parts, which say where a file lay and how large it was."""
    return {
        f"{path.stem[:40]}-{corpus.digest(f'{path} {path.stat().st_size}')[:12]}": path
        for path in corpus.named_files(paths)
    }


def part_of(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--part {text}: give the number of this part and of all, as 3/16.")
    return int(found[1]), int(found[2])


def keep_plan(asked: Preparation) -> None:
    """Writes what all parts have in common, or compares it; keeps the tokenizer."""
    kept = cache.cache_folder() / "tokenizers"
    kept.mkdir(parents=True, exist_ok=True)
    content = tokenizer.named(asked.tokenizer, kept).to_str()
    plan = {
        "format": cache.FORMAT,
        "tokenizer_sha256": corpus.digest(content),
        "text_field": asked.text_field,
        "val_fraction": asked.val_fraction,
    }
    path = asked.out / PLAN
    if path.exists():
        try:
            kept_plan = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise DamagedFileError(
                f"{path} is damaged ({error}): give another --out, or remove it to go on, if the"
                " folder was prepared with these flags."
            ) from None
        if kept_plan != plan:
            raise UserError(
                f"{asked.out} was prepared with another tokenizer, --text-field or "
                f"--val-fraction: {path} has them. Give these, or another --out."
            )
        return
    cache.keep_tokenizer(asked.out, tokenizer.named(asked.tokenizer, kept))
    write_atomically(path, json.dumps(plan, indent=2).encode())


def tokenize(asked: Preparation, name: str, path: Path) -> int:
    """Writes the shards of a file; returns the number of its tokens."""
    folder, modified = asked.out / "parts" / name, path.stat().st_mtime_ns
    (folder / cache.META).unlink(missing_ok=True)  # of an earlier text
    encoder, stamp = cache.load_tokenizer(asked.out, Path(asked.tokenizer).name[:80])
    writers = train, val = Writer(folder, "train", stamp), Writer(folder, "val", stamp)
    back, read, count = tokenizer.RoundTrip(encoder), 0, 0
    with cache.writing(folder):
        documents = texts(path, path.stat().st_size, asked.text_field)
        for text, ids in tokenizer.encode(encoder, documents):
            writer = train
            if is_held_out(text, asked.val_fraction):
                writer = val
                back.add(text, ids)
            writer.add(ids, len(text.encode()))
            read, count = read + 1, count + len(ids)
            if writer.is_full:
                writer.flush(read)
        for writer in writers:
            if writer.n_tokens:
                writer.flush(read)
        cache.finish(folder, stamp, train, val, back.share, modified)
    return count


def finish(asked: Preparation, inputs: dict[str, Path], say: Callable[[str], None]) -> None:
    """Names the parts if all are complete; several processes may do so at the same time."""
    out, names = asked.out, sorted(inputs)
    if left := sum(not is_done(out, name, inputs[name]) for name in names):
        say(f"{left} files are left to other parts.")
        return
    metas = [cache.read_meta(out / "parts" / name) for name in names]
    for split in ("train", "val"):
        if not any(getattr(meta, split) for meta in metas):
            raise UserError(
                f"none of the documents is {split} text with --val-fraction {asked.val_fraction:g},"
                " so that no run could read them. Give more documents (rows of .jsonl or .parquet;"
                " a plain text is one), or another fraction with another --out."
            )
    write_atomically(out / cache.PARTS, json.dumps(names, indent=1).encode())
    say(f"complete: --data.source prepared --data.paths {out}")
