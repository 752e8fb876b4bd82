"""Tokens that another trainer wrote: `.bin` files of nanoGPT, llm.c and modded-nanogpt.

nanoGPT's have no header: they are tokens alone, uint16, or uint32 where the vocabulary has more
than 65,536 tokens.
"""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from examples.trainer.data import token_files
from examples.trainer.data.corpus import check_known
from examples.trainer.data.token_files import TokenFile, Tokens, joined
from examples.trainer.data.token_folder import Dataset
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import UserError

ENDS_BYTES = 2**20  # of each file, for the name of the content
ENOUGH = 32  # tokens above 0: in no text of 16-bit tokens every second one is 0 so often by chance


def prepare(config: DataConfig, tokenizer: Tokenizer) -> Dataset:
    """Opens the files of both splits; raises `UserError` that names a file that does not fit."""
    words, lengths = tokenizer.get_vocab_size(), token_bytes(tokenizer)
    train = read_split(config, "train", words, None)
    val = read_split(config, "val", words, lengths)
    content = " ".join((tokenizer.to_str(), train.meta.sha256, val.meta.sha256))
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    return Dataset(tokenizer, train, val, key, lost=unknown_share(tokenizer, val))


def read_split(config: DataConfig, split: str, words: int, lengths: np.ndarray | None) -> Tokens:
    """The tokens of files with `train` or `val` in their names; `lengths` counts their bytes."""
    paths = [
        path for path in named(config.paths) if split in re.split(r"[^a-z]+", path.name.lower())
    ]
    parts = [open_file(path, words) for path in paths]
    if not sum(map(len, parts)):
        where = ", ".join(config.paths) or "no --data.paths"
        raise UserError(
            f"there are no {split} tokens in {where}: give .bin files, or their folder, with"
            f" {split} in the names, as {split}.bin or fineweb_{split}_000001.bin."
        )
    for part in parts:
        token_files.check_ids(part, words, config.verify)
    n_bytes = 0 if lengths is None else sum(count(part, lengths) for part in parts)
    return joined(parts, n_bytes, list(map(digest_of, paths)))


def named(given: tuple[str, ...]) -> list[Path]:
    """The files given, and those in the folders given, in the order of their names."""
    found: list[Path] = []
    for path in map(Path, given):
        if not path.exists():
            raise UserError(f"{path} does not exist: give .bin files or folders of them.")
        found += sorted(filter(is_bin, path.iterdir())) if path.is_dir() else [path]
    return found


def is_bin(path: Path) -> bool:
    return path.suffix.lower() == ".bin"


def open_file(path: Path, words: int) -> TokenFile:
    """The tokens of a file with or without a header; refuses wider numbers without one."""
    check_known(path)
    found = token_files.open_file(path, token_files.dtype_of(words))
    look = found[: token_files.BLOCK] if not found.offset else np.zeros(0)
    if np.count_nonzero(look) >= ENOUGH and not look[1::2].any():
        raise UserError(
            f"{path} seems to hold numbers of more bits than {found.dtype.name}, as every second"
            " one is 0. Write it again as that, by np.fromfile(PATH, TYPE)"
            f".astype({found.dtype.str!r}).tofile(PATH), or with the header of llm.c."
        )
    return found


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """How many bytes of text each token stands for.

    A byte-level tokenizer has a letter for each byte; others have bytes as <0x41>.
    """
    found = np.zeros(tokenizer.get_vocab_size(), np.int64)
    byte_level = "ByteLevel" in repr(tokenizer.decoder)  # also of a Sequence
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    for word, i in tokenizer.get_vocab().items():
        plain = re.sub(r"^<0x..>$", ".", word).replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
        found[i] = 0 if i in special else len(word) if byte_level else len(plain.encode())
    return found


def count(part: TokenFile, lengths: np.ndarray) -> int:
    return sum(int(lengths[block].sum()) for block in token_files.blocks(part))


def unknown_share(tokenizer: Tokenizer, tokens: Tokens) -> float:
    """The share of tokens that stand for what the tokenizer does not know."""
    model = json.loads(tokenizer.to_str())["model"]
    word = model.get("unk_token")
    unknown = model.get("unk_id") if word is None else tokenizer.token_to_id(word)
    ids = tokens.ids[: token_files.HASHED_BYTES // 4]
    return 0.0 if unknown is None else np.count_nonzero(ids == unknown) / max(1, len(ids))


def digest_of(path: Path) -> str:
    """Stands for the content of a file: its size, its beginning and its end."""
    with path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(ENDS_BYTES)
        file.seek(max(0, size - ENDS_BYTES))
        return hashlib.sha256(b"%d" % size + start + file.read()).hexdigest()
