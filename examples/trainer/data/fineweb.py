"""FineWeb, streamed from the Hugging Face hub into a folder of tokens.

An interrupted stream is continued.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from examples.trainer.data import token_folder, tokenizer
from examples.trainer.data.corpus import split_by
from examples.trainer.data.token_folder import Dataset, Writer
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import DamagedFileError, UserError, load_package

# 100 billion GPT-2 tokens: more than the paper's longest runs, 72 billion.
SOURCE = ("HuggingFaceFW/fineweb", "sample-100BT", "train")
TOKENIZER = "gpt2"


def prepare(config: DataConfig, say: Callable[[str], None]) -> Dataset:
    """The first `config.tokens` tokens, from the cache if it has them."""
    folder = token_folder.cache_folder() / f"fineweb-{cache_key(config)}"
    try:
        if not token_folder.is_complete(folder):
            with token_folder.writing_alone(folder, say):
                if not token_folder.is_complete(folder):
                    fill(folder, config, say)
        return token_folder.open_folder(folder)
    except DamagedFileError as error:
        raise UserError(
            f"{error} Delete the folder {folder}: the next run streams it again."
        ) from None


def cache_key(config: DataConfig) -> str:
    """The name of the cache folder, known without a network."""
    name = config.tokenizer or TOKENIZER
    path = tokenizer.file_of(name)
    if name not in tokenizer.HUB and path.is_file():
        name = hashlib.sha256(path.read_bytes()).hexdigest()
    parts = (token_folder.FORMAT, SOURCE, name, config.end_token, config.val_fraction)
    return hashlib.sha256(repr((*parts, int(config.tokens))).encode()).hexdigest()[:16]


def fill(folder: Path, config: DataConfig, say: Callable[[str], None]) -> None:
    stream = open_stream()  # first, so that a missing network or package is reported at once
    if not (folder / "tokenizer.json").exists():
        made = token_folder.named_tokenizer(config.tokenizer or TOKENIZER, config.end_token)
        token_folder.keep_tokenizer(folder, made)
    writer, limit = Writer(folder), int(config.tokens)
    say(
        f"streaming FineWeb to {limit:,} training tokens, from {writer.n_tokens:,}; this is "
        f"done once, into {folder}"
    )
    if writer.n_tokens < limit:
        texts = documents(stream.skip(writer.read))
        if not writer.fill(texts, split_by(config.val_fraction), limit, say):
            say(f"FineWeb ends after {writer.n_tokens:,} training tokens.")
    writer.finish()


def open_stream() -> Any:
    """A stream of all rows; nothing is read yet."""
    datasets = load_package("datasets", "--data.source fineweb", "fineweb")
    name, part, split = SOURCE
    try:
        return datasets.load_dataset(name, name=part, split=split, streaming=True)
    except Exception as error:  # of the network, of the hub, of the package: no common class
        raise tokenizer.unreachable("FineWeb", error) from None


def documents(rows: Any) -> Iterator[str]:
    """The texts of a stream."""
    try:
        for row in rows:
            yield row["text"]
    except Exception as error:  # as above
        more = "more of FineWeb (the same command continues from the last complete shard)"
        raise tokenizer.unreachable(more, error) from None
