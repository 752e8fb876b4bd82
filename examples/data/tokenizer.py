"""A lossless byte-level BPE that is trained on the text at hand."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.errors import DamagedFileError

END = "<|endoftext|>"
SAMPLE_BYTES = 2_000_000  # text that merges are learned from; more takes longer and changes little


def train(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of at most `vocab_size` tokens; less if the text is too short for more."""
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


def load(path: Path) -> Tokenizer:
    """A saved tokenizer, under which END inside a text is text and no end of a document."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise DamagedFileError(f"{path} is not a tokenizer: {error}.") from None
    tokenizer.encode_special_tokens = True
    return tokenizer


def end_id(tokenizer: Tokenizer) -> int:
    """The id of the token that stands between documents."""
    end = tokenizer.token_to_id(END)
    if end is None:
        raise DamagedFileError(f"the tokenizer has no {END}: it was not made by `train`.")
    return end


def encode(tokenizer: Tokenizer, documents: list[str]) -> Iterator[list[int]]:
    """The ids of each document, after an END that starts it."""
    end = end_id(tokenizer)
    for start in range(0, len(documents), 256):  # enough for all cores, little in memory
        for encoding in tokenizer.encode_batch_fast(documents[start : start + 256]):
            yield [end, *encoding.ids]
