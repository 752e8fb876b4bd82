"""Tokens that another trainer wrote: `.bin` files of nanoGPT, llm.c and modded-nanogpt.

A plain file is tokens alone, little-endian: uint16, or uint32 where the vocabulary has more than
65,536 tokens (nanoGPT); 32 and 64 bits of other writers are known by the zeros in them. The others
begin with 256 int32, of which the first three are a magic number, a version and the number of
tokens: 20240520 and 1 before uint16, 20240801 and 7 before uint32 (karpathy/llm.c,
dev/data/data_common.py; modded-nanogpt has the first of them).
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from examples.trainer.data.cache import Dataset
from examples.trainer.data.files import check_known
from examples.trainer.data.loader import Joined, Tokens, TokensMeta
from examples.trainer.data.shards import HASHED_BYTES
from examples.trainer.settings.data import DataConfig
from examples.trainer.system import files
from examples.trainer.system.errors import UserError

HEADER_BYTES = 256 * 4
KINDS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
"""Magic number to version and type of the tokens."""
ENDS_BYTES = 2**20  # of each file, for the name of the content
WIDE = ("<i8", "<u4")  # the widest first: tokens of 64 bits are also ones of 32, with zeros between
OTHERS = ("<f8", "<f4", "<f2", ">i8", ">u4")
ENOUGH = 32  # tokens above 0: in no text of 16-bit tokens every second one is 0 so often by chance


def prepare(config: DataConfig, tokenizer: Tokenizer) -> Dataset:
    """Opens the files of both splits; raises `UserError` that names a file that does not fit."""
    words = tokenizer.get_vocab_size()
    train, val = (
        read_split(config, split, words, counter)
        for split, counter in (("train", None), ("val", token_bytes(tokenizer)))
    )
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
    for path, part in zip(paths, parts, strict=True):
        check_tokens(path, part, words, config.verify)
    n_bytes = 0 if lengths is None else sum(count(part, lengths) for part in parts)
    digest = hashlib.sha256("".join(map(digest_of, paths)).encode()).hexdigest()
    size = sum(map(len, parts))
    return Tokens(Joined(parts), TokensMeta(parts[0].dtype.name, size, n_bytes, digest))


def named(given: tuple[str, ...]) -> list[Path]:
    """The files given, and those in the folders given, in the order of their names."""
    found: list[Path] = []
    for path in map(Path, given):
        if not path.exists():
            raise UserError(f"{path} does not exist: give .bin files or folders of them.")
        if path.is_dir():
            found += sorted(inside for inside in path.iterdir() if is_bin(inside))
        else:
            found.append(path)
    return found


def is_bin(path: Path) -> bool:
    return path.suffix.lower() == ".bin"


def open_file(path: Path, words: int) -> np.ndarray:
    """The tokens of a file, memory-mapped."""
    check_known(path)
    with files.explained(path, "read"):
        size = path.stat().st_size
        with path.open("rb") as file:
            look = file.read(ENDS_BYTES)
        start = np.frombuffer(look[:12], "<i4") if size >= HEADER_BYTES else np.zeros(3)
        if int(start[0]) not in KINDS:
            return mapped(path, type_of(path, look, size, words), 0, size)
        version, dtype = KINDS[int(start[0])]
        if start[1] != version:
            raise UserError(f"{path} has version {start[1]} in its header: give {version}.")
        tokens = mapped(path, dtype, HEADER_BYTES, size)
    if len(tokens) != start[2]:
        raise UserError(
            f"{path} is truncated or from elsewhere: its header says {start[2]} tokens, and it has"
            f" {len(tokens)}. Make it again."
        )
    return tokens


def type_of(path: Path, look: bytes, size: int, words: int) -> np.dtype:
    """The type of tokens without a header, which begin with `look`: the first that all of them fit.

    Raises `UserError` for one that is not read, and for too few tokens to tell.
    """
    usual = np.dtype("<u2" if words <= 2**16 else "<u4")
    kinds = [np.dtype(kind) for kind in (*WIDE, *OTHERS, usual, ">u2")]
    for kind in kinds if size else ():
        numbers = np.frombuffer(look[: len(look) // kind.itemsize * kind.itemsize], kind)
        if kind.itemsize < usual.itemsize or size % kind.itemsize or not fit(numbers, words):
            continue
        sure = np.count_nonzero(numbers) >= ENOUGH
        if kind == usual or (kind.str in WIDE and sure):
            return kind
        raise UserError(
            f"{path} seems to hold {kind.name} ({kind.str}) and not {usual.name}"
            f"{'' if sure else ', but has too few tokens to tell'}. If so, write it again, by"
            f" np.fromfile(PATH, {kind.str!r}).astype({usual.str!r}).tofile(PATH); the header of"
            " llm.c before the tokens leaves no question."
        )
    return usual


def fit(numbers: np.ndarray, words: int) -> bool:
    """Whether all numbers are tokens."""
    with np.errstate(invalid="ignore"):  # what is read as a float may be NaN
        return bool(((numbers >= 0) & (numbers < words) & (np.floor(numbers) == numbers)).all())


def mapped(path: Path, dtype: np.dtype, offset: int, size: int) -> np.ndarray:
    if (size - offset) % dtype.itemsize:
        raise UserError(
            f"{path} has {size - offset} bytes of tokens, which {dtype.name} does not divide: it is"
            " truncated or of another type. Make it again."
        )
    if size == offset:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r", offset)


def check_tokens(path: Path, tokens: np.ndarray, words: int, whole: bool) -> None:
    """Refuses tokens that are not in the vocabulary; looks at the first 256 MB, or at all."""
    for i, block in enumerate(blocks(tokens if whole else tokens[: HASHED_BYTES // 4])):
        wrong = (block < 0) | (block >= words)
        if wrong.any():
            first = int(np.argmax(wrong))
            raise UserError(
                f"{path} has token {block[first]} at {i * ENDS_BYTES + first}, and the vocabulary"
                f" has {words} tokens: give its own --data.tokenizer, or, if the file is no"
                f" {tokens.dtype.name}, write it as that."
            )


def blocks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(tokens), ENDS_BYTES):
        yield tokens[start : start + ENDS_BYTES]


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """How many bytes of text each token stands for.

    A byte-level tokenizer has a letter for each byte; others have bytes as <0x41>.
    """
    found = np.zeros(tokenizer.get_vocab_size(), np.int64)
    byte_level = "ByteLevel" in type(tokenizer.decoder).__name__
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    for word, i in tokenizer.get_vocab().items():
        plain = re.sub(r"^<0x..>$", ".", word).replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
        found[i] = 0 if i in special else len(word) if byte_level else len(plain.encode())
    return found


def count(tokens: np.ndarray, lengths: np.ndarray) -> int:
    return sum(int(lengths[block].sum()) for block in blocks(tokens))


def unknown_share(tokenizer: Tokenizer, tokens: Tokens) -> float:
    """The share of tokens that stand for what the tokenizer does not know."""
    model = json.loads(tokenizer.to_str())["model"]
    word = model.get("unk_token")
    unknown = model.get("unk_id") if word is None else tokenizer.token_to_id(word)
    ids = tokens.ids[: HASHED_BYTES // 4]
    return 0.0 if unknown is None else np.count_nonzero(ids == unknown) / max(1, len(ids))


def digest_of(path: Path) -> str:
    """Stands for the content of a file: its size, its beginning and its end."""
    with path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(ENDS_BYTES)
        file.seek(max(0, size - ENDS_BYTES))
        return hashlib.sha256(b"%d" % size + start + file.read()).hexdigest()
