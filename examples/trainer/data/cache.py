"""The folder of a tokenized text: `tokenizer.json`, shards, and `meta.json` when complete."""

import contextlib
import hashlib
import json
import os
import statistics
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer

from examples.trainer.data import tokenizer
from examples.trainer.data.loader import Tokens
from examples.trainer.data.shards import Stamp, Writer, open_shards, shard_path
from examples.trainer.settings.validation import problems
from examples.trainer.system.errors import DamagedFileError, UserError
from examples.trainer.system.files import write_atomically

META = "meta.json"
PARTS = "parts.json"  # of a folder with a part for each file
FORMAT = 2  # increase it when the same text and settings would give other files


@dataclass(frozen=True)
class Part:
    """One text of a mixture."""

    name: str
    """As it was given."""
    rows: int
    """How many rows of a block of a mixture are from it."""
    train: Tokens
    val: Tokens


@dataclass(frozen=True)
class Dataset:
    """The text of a run, as tokens."""

    tokenizer: Tokenizer
    train: Tokens
    val: Tokens
    key: str
    """Identifies the content: equal keys mean equal tokens."""
    parts: tuple[Part, ...] = ()
    """The texts of a mixture, of which `train` and `val` have all tokens."""
    lost: float | None = 0.0
    """The share of the validation text that its tokens do not give back; None: not known."""


@dataclass(frozen=True)
class Meta:
    """What `meta.json` holds."""

    tokenizer: str
    """Name of the tokenizer."""
    tokenizer_sha256: str
    train: list[str]
    """Hashes of the tokens of each shard."""
    val: list[str]
    lost: float | None = None
    """As in `Dataset`; None in files of earlier versions."""
    modified: int | None = None
    """When the file of a part was last written, in nanoseconds."""

    def shards(self, folder: Path, split: str) -> dict[Path, str]:
        """The shards of `train` or `val`, and the hashes of their tokens."""
        return {shard_path(folder, split, i): x for i, x in enumerate(getattr(self, split))}


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rule says to ignore a relative path.
    root = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    return root / "optax_muonplus"


def is_complete(folder: Path, alone: bool = True) -> bool:
    """Whether `finish` has run here and no file was deleted since.

    A folder that is not `alone` has its tokenizer elsewhere.
    """
    if not (folder / META).exists():
        return False
    try:
        meta = read_meta(folder)
    except DamagedFileError:
        return True  # `open_dataset` will report what is wrong
    own = (folder / "tokenizer.json",) if alone else ()
    shards = (*meta.shards(folder, "train"), *meta.shards(folder, "val"))
    return all(path.exists() for path in (*own, *shards))


@contextlib.contextmanager
def writing(folder: Path) -> Generator[None]:
    """Creates a folder to write in; if that fails, the error says what to do."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BrokenPipeError:  # of what was said meanwhile
        raise
    except OSError as error:
        raise UserError(
            f"cannot write the cache {folder}: {error.strerror}. "
            "Set XDG_CACHE_HOME to a folder that can be written."
        ) from None


def keep_tokenizer(folder: Path, made: Tokenizer) -> None:
    """Writes the tokenizer, which must come before the shards."""
    write_atomically(folder / "tokenizer.json", made.to_str().encode())


def load_tokenizer(folder: Path, name: str) -> tuple[Tokenizer, Stamp]:
    """The tokenizer that `keep_tokenizer` wrote, and its stamp for the headers of shards."""
    path = folder / "tokenizer.json"
    loaded = tokenizer.load(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return loaded, Stamp(name, digest, loaded.get_vocab_size())


def finish(
    folder: Path,
    stamp: Stamp,
    train: Writer,
    val: Writer,
    lost: float | None,
    modified: int | None = None,
) -> None:
    """Writes `meta.json`, which lists the files of the text; must come last."""
    meta = Meta(stamp.name, stamp.sha256, train.written, val.written, lost, modified)
    write_atomically(folder / META, json.dumps(asdict(meta), indent=2).encode())


def read_meta(folder: Path) -> Meta:
    path = folder / META
    try:
        return TypeAdapter(Meta).validate_json(path.read_bytes())
    except OSError as error:
        what = str(error)
    except ValidationError as error:
        what = problems(error)
    raise DamagedFileError(f"{path} does not fit its folder: {what}.")


def open_dataset(folder: Path, verify: bool) -> Dataset:
    """Opens a complete text; raises `DamagedFileError` that names a file that has changed."""
    meta = read_meta(folder)
    return joined(folder, {folder: meta}, meta.tokenizer, verify)


def open_parts(folder: Path, verify: bool) -> Dataset:
    """Opens a text that has a part for each of its files."""
    path = folder / PARTS
    try:
        names = TypeAdapter(list[str]).validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no {PARTS}: `python -m examples.data prepare --out {folder} ...` writes "
            "it when all files are tokenized."
        ) from None
    except (OSError, ValidationError) as error:
        raise DamagedFileError(f"{path} names no parts: {error}.") from None
    parts = [folder / "parts" / Path(name).name for name in names]
    metas = {part: read_meta(part) for part in parts}
    return joined(folder, metas, next((x.tokenizer for x in metas.values()), ""), verify)


def joined(folder: Path, metas: dict[Path, Meta], name: str, verify: bool) -> Dataset:
    """The text of folders that have the tokenizer of `folder`, one after the other."""
    loaded, stamp = load_tokenizer(folder, name)
    if any(meta.tokenizer_sha256 != stamp.sha256 for meta in metas.values()):
        raise DamagedFileError(f"{folder / 'tokenizer.json'} is truncated or from elsewhere.")
    found = []
    for split in ("train", "val"):
        shards = {p: x for part, meta in metas.items() for p, x in meta.shards(part, split).items()}
        if not shards:
            raise UserError(
                f"{folder} has no {split} text, as it had too few documents to hold one out:"
                " prepare more of them, or with another --val-fraction."
            )
        found.append(open_shards(shards, stamp, verify))
    train, val = found
    content = f"{stamp.sha256} {train.meta.sha256} {val.meta.sha256}"
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    known = [meta.lost for meta in metas.values() if meta.lost is not None and meta.val]
    return Dataset(loaded, train, val, key, lost=statistics.fmean(known) if known else None)
