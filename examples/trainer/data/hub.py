"""A dataset of the Hugging Face hub, such as FineWeb, streamed into shards.

An interrupted stream is continued.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from examples.trainer.data import cache, tokenizer
from examples.trainer.data.cache import Dataset
from examples.trainer.data.hub_rows import (
    FINEWEB,
    Source,
    column_of,
    documents,
    open_stream,
    source_of,
)
from examples.trainer.data.shards import Stamp, Writer, read_header, shard_path
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import DamagedFileError, UserError

TOKENIZER = "gpt2"


def prepare(
    config: DataConfig, root: Path, say: Callable[[str], None], stream: bool = True
) -> Dataset:
    """The first `config.tokens` tokens of a source, from a folder in `root` if it has them."""
    source = source_of(config)
    kind = "fineweb" if source is FINEWEB else "hub"
    folder = root / f"{kind}-{cache_key(config, source)}"
    try:
        if not cache.is_complete(folder):
            if not stream:
                raise UserError(
                    f"{folder} has not all tokens of {source.title} yet. A resume does not ask the "
                    "hub for what a file names, and of several processes all would wait while one "
                    "makes them. Make them before, on one machine: python -m "
                    f"examples.data {source.flags} --tokens {config.tokens:g} --tokenizer "
                    f"{config.tokenizer or TOKENIZER} --val-fraction {config.val_fraction:g}. "
                    "Or give --tokenize."
                )
            with cache.writing(folder):
                fill(folder, config, source, root, say)
        return cache.open_dataset(folder, config.verify)
    except DamagedFileError as error:
        raise UserError(
            f"{error} Delete that file: the next run streams it and what comes after it again."
        ) from None


def cache_key(config: DataConfig, source: Source) -> str:
    """The name of the cache folder, known without a network."""
    name = config.tokenizer or TOKENIZER
    path = Path(name)
    if name not in tokenizer.HUB and path.is_file():
        name = hashlib.sha256(path.read_bytes()).hexdigest()
    which: tuple[str | None, ...] = (source.name, source.config)
    if source is not FINEWEB:
        which += (source.split, source.column)
    parts = (cache.FORMAT, *which, name, config.val_fraction, int(config.tokens))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def fill(
    folder: Path, config: DataConfig, source: Source, root: Path, say: Callable[[str], None]
) -> None:
    stream = open_stream(source)  # first, so that a missing network or package is reported at once
    column = source.column if source is FINEWEB else column_of(stream, source)
    name = config.tokenizer or TOKENIZER
    if not (folder / "tokenizer.json").exists():
        kept = root / "tokenizers"
        kept.mkdir(exist_ok=True)
        cache.keep_tokenizer(folder, tokenizer.named(name, kept))
    encoder, stamp = cache.load_tokenizer(folder, Path(name).name[:80])
    shards = Shards(folder, stamp, config, tokenizer.RoundTrip(encoder))
    shards.continue_from_disk()
    limit = int(config.tokens)
    say(
        f"streaming {source.title} to {limit:,} training tokens, from {shards.n_tokens:,}; this is "
        f"done once, into {folder}"
    )
    if shards.n_tokens < limit:
        texts = documents(stream, shards.read, column, source)
        if not stream_into(shards, tokenizer.encode(encoder, texts), limit, say):
            say(f"{source.title} ends after {shards.n_tokens:,} training tokens.")
    cache.finish(folder, stamp, shards.train, shards.val, shards.back.share)


def stream_into(
    shards: "Shards",
    texts: Iterable[tuple[str, list[int]]],
    limit: int,
    say: Callable[[str], None],
) -> bool:
    """Writes shards until there are enough training tokens; whether there were."""
    for text, ids in texts:
        shards.add(text, ids)
        if shards.is_due(limit):
            shards.flush()
            say(f"  {shards.n_tokens:,} tokens")
        if shards.n_tokens >= limit:
            return True
    if shards.train.n_tokens + shards.val.n_tokens or not shards.train.written:
        shards.flush()
    return False


@dataclass
class Shards:
    """The growing training and validation texts; their shards are written in pairs.

    Both shards of a pair end at the same document of the stream.
    """

    folder: Path
    stamp: Stamp
    config: DataConfig
    back: tokenizer.RoundTrip
    read: int = 0
    """Documents read from the stream so far."""
    n_tokens: int = 0
    """Training tokens on disk."""
    train: Writer = field(init=False)
    val: Writer = field(init=False)

    def __post_init__(self):
        self.train, self.val = (Writer(self.folder, s, self.stamp) for s in ("train", "val"))

    def continue_from_disk(self) -> None:
        while True:
            pair = [shard_path(self.folder, w.name, len(w.written)) for w in self.writers]
            if not all(path.exists() for path in pair):
                return
            val, train = (read_header(path, self.stamp) for path in pair)
            if not self.read < val.read == train.read:
                raise DamagedFileError(
                    f"{pair[1]} or {pair[0].name} is from elsewhere: they do not continue the "
                    "shards before them."
                )
            for writer, header in zip(self.writers, (val, train), strict=True):
                writer.written.append(header.tokens.sha256)
            self.read = train.read
            self.n_tokens += train.tokens.tokens

    def add(self, text: str, ids: list[int]) -> None:
        """Adds a document to the text that its hash selects."""
        writer = self.train
        if is_held_out(text, self.config.val_fraction):
            writer = self.val
            self.back.add(text, ids)
        writer.add(ids, len(text.encode()))
        self.read += 1

    def is_due(self, limit: int) -> bool:
        enough = self.n_tokens + self.train.n_tokens >= limit
        return enough or self.train.is_full or self.val.is_full

    def flush(self) -> None:
        self.n_tokens += self.train.n_tokens
        for writer in self.writers:
            writer.flush(self.read)

    @property
    def writers(self) -> tuple[Writer, Writer]:
        """The writers, in the order in which a pair is written."""
        return self.val, self.train


def is_held_out(text: str, val_fraction: float) -> bool:
    """Whether a document is for validation; copies of a document are always in the same text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) < val_fraction * 2**64
