"""The tokenizer: a byte-level BPE that is trained on the text, or a `tokenizer.json`.

Every text comes back from its tokens: a tokenizer that loses some is refused, as its loss in bits
per byte would be too low.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from examples.trainer.system import files
from examples.trainer.system.errors import DamagedFileError, UserError
from examples.trainer.system.files import write_atomically

END = "<|endoftext|>"
# Tokens that stand between documents, of tokenizers that name none: the first one found is used.
ENDS = (END, "<s>", "</s>")
# Where a tokenizer is. Access to Meta's own LLaMA-2 tokenizer is gated; this copy is free.
HUB = {"gpt2": "openai-community/gpt2", "llama2": "hf-internal-testing/llama-tokenizer"}
SAMPLE_BYTES = 2_000_000  # text to learn merges from; more takes longer and changes little
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # in the tokens of SentencePiece
BYTES = [f"<0x{i:02X}>" for i in range(256)]
"""The tokens of SentencePiece for bytes; ByteLevel has a letter for each."""
PROBE = "A Naïve  ŒUVRE\t“…²”\r\n  日本語 🎉 \U000f1234 \x01.\n"


def train(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of at most `vocab_size` tokens; fewer if the text is too short."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(head(documents, SAMPLE_BYTES), trainer)
    return tokenizer


def head(documents: Iterable[str], size: int) -> Iterator[str]:
    """The first documents, until `size` characters are reached."""
    for document in documents:
        if size <= 0:
            return
        size -= len(document)
        yield document


def named(name: str, folder: Path, end: str = "") -> Tokenizer:
    """A tokenizer from the hub or a file; downloads are kept in `folder`, which must exist."""
    if name not in HUB:
        if not (path := file_of(name)).exists():
            raise UserError(
                f"--data.tokenizer {name} is neither {' nor '.join(HUB)} nor a tokenizer.json nor a"
                " folder with one: give one of them, or omit it to train one on the text."
            )
        return load(path, end)
    path = folder / f"{name}.json"
    if not path.exists():
        try:
            content = Tokenizer.from_pretrained(HUB[name]).to_str().encode()
        except Exception as error:  # of the network, of the hub, of the file: no common class
            raise unreachable(f"the tokenizer {HUB[name]}", error) from None
        write_atomically(path, content)
    return load(path, end)


def file_of(name: str) -> Path:
    """The file of a tokenizer, which may be named by its folder."""
    return Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)


def load(path: Path, end: str = "") -> Tokenizer:
    """A saved tokenizer, set to encode END inside a text as plain text.

    `end` is to stand between documents. By default that is what the tokenizer itself puts before
    texts, or the first of `ENDS` that it has.
    """
    files.check_regular(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise DamagedFileError(f"{path} is not a tokenizer: {error}.") from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    check_lossless(path, tokenizer)
    if end and tokenizer.token_to_id(end) is None:
        raise UserError(f"--data.end-token {end}: {path} has no such token: give one of its own.")
    word = end or next(iter(starts(tokenizer)), None)
    tokenizer.post_processor = None
    listed = next((x for x in ENDS if tokenizer.token_to_id(x) is not None), None)
    if word not in (None, listed):
        begin_with(word, tokenizer)  # so that all who read a copy have the same token
    return tokenizer


def check_lossless(path: Path, tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer without tokens for all bytes, or one that changes the text."""
    words = tokenizer.get_vocab()
    if max(words.values(), default=0) >= max(1, len(words)):
        raise UserError(f"{path} leaves out numbers in its vocabulary: give one that does not.")
    alphabet = BYTES if has_bytes(tokenizer) else pre_tokenizers.ByteLevel.alphabet()
    if words.keys() >= {*alphabet}:
        ids = tokenizer.encode(PROBE, add_special_tokens=False).ids
        if tokenizer.decode(ids, skip_special_tokens=False) in (PROBE, f" {PROBE}"):
            return
    raise UserError(
        f"the tokenizer {path} loses text, as it has no tokens for some of it or changes it: bits"
        " per byte would be too low. Give one with tokens for all bytes, or omit it."
    )


def has_bytes(tokenizer: Tokenizer) -> bool:
    """Whether bytes are tokens such as <0x41>, as in SentencePiece."""
    return tokenizer.token_to_id(BYTES[0]) is not None


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """How many bytes of text each token stands for."""
    found = np.zeros(tokenizer.get_vocab_size(), np.int64)
    byte_level = not has_bytes(tokenizer)
    for word, i in tokenizer.get_vocab().items():
        found[i] = len(word) if byte_level else len(word.replace(SPACE, " ").encode())
    if not byte_level:
        found[[tokenizer.token_to_id(word) for word in BYTES]] = 1
    for i, token in tokenizer.get_added_tokens_decoder().items():
        found[i] = 0 if token.special else len(token.content.encode())
    return found


def starts(tokenizer: Tokenizer) -> list[str]:
    """The special tokens that a tokenizer's own post-processor puts into every text."""
    empty = tokenizer.encode("")
    pairs = zip(empty.tokens, empty.special_tokens_mask, strict=True)
    return [token for token, special in pairs if special]


def begin_with(word: str, tokenizer: Tokenizer) -> None:
    """Lets a tokenizer say in its file, as LLaMA's does, which token begins a text."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{word} $A",
        pair=f"{word} $A {word} $B",
        special_tokens=[(word, tokenizer.token_to_id(word))],
    )


def end_of(tokenizer: Tokenizer) -> tuple[str, int]:
    """The token that stands between documents and begins each, and its id."""
    for word in (*starts(tokenizer), *ENDS):
        if (number := tokenizer.token_to_id(word)) is not None:
            return word, number
    raise UserError(
        f"the tokenizer names no token that begins a text, and has none of {', '.join(ENDS)}: give"
        " the one to stand between documents as --data.end-token."
    )


def end_id(tokenizer: Tokenizer) -> int:
    """The id of the token that stands between documents."""
    return end_of(tokenizer)[1]


def encode(tokenizer: Tokenizer, documents: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
    """Each document with its ids; the ids begin with the token that starts a document."""
    end = end_id(tokenizer)
    waiting = iter(documents)
    while batch := list(itertools.islice(waiting, 256)):  # enough for all cores, and little memory
        for document, ids in zip(batch, ids_of(tokenizer, batch), strict=True):
            yield document, [end, *ids]


def ids_of(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of each text; raises `UserError` for one that no UTF-8 can write."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError as error:  # of a command line
        raise UserError(f"{texts[0][:40]!r} is not UTF-8 text ({error.reason}).") from None
    found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in found]


def unreachable(what: str, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return UserError(
        f"cannot get {what} from the Hugging Face hub: {reason}. Without a network, train on files"
        " (--data.paths), or on the default text, and give a tokenizer as --data.tokenizer"
        " PATH/tokenizer.json."
    )
