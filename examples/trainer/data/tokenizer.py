"""The tokenizer: a byte-level BPE that is trained on the text, or a `tokenizer.json`."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from examples.trainer.system import files
from examples.trainer.system.errors import UserError

END = "<|endoftext|>"
# Tokens that stand between documents, of tokenizers that name none: the first one found is used.
ENDS = (END, "<s>", "</s>")
# Where a tokenizer is. Access to Meta's own LLaMA-2 tokenizer is gated; this copy is free.
HUB = {"gpt2": "openai-community/gpt2", "llama2": "hf-internal-testing/llama-tokenizer"}
SAMPLE_SIZE = 2_000_000  # characters to learn merges from; more takes longer and changes little
# Text with each byte that UTF-8 can have, and with what normalizers change.
LETTERS = (*range(0x800), *range(0x800, 0x110000, 0x800))
PROBE = " \r\n  " + "".join(chr(i) for i in LETTERS if not 0xD800 <= i < 0xE000) + " \n"


def train(documents: Sequence[str], vocab_size: int) -> Tokenizer:
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
    before = itertools.accumulate(map(len, documents), initial=0)
    read = [text for text, size in zip(documents, before, strict=False) if size < SAMPLE_SIZE]
    tokenizer.train_from_iterator(read, trainer)
    return tokenizer


def named(name: str, end: str = "") -> Tokenizer:
    """A tokenizer of the hub, which keeps what it has downloaded, or of a file."""
    if name not in HUB:
        return load(Path(name), end)
    try:
        found = Tokenizer.from_pretrained(HUB[name])
    except Exception as error:  # of the network, of the hub, of the file: no common class
        raise UserError(
            f"cannot get the tokenizer {HUB[name]} from the Hugging Face hub ({error}): without"
            " a network give --data.tokenizer PATH/tokenizer.json."
        ) from None
    return ready(found, end)


def load(path: Path, end: str = "") -> Tokenizer:
    """The tokenizer of a file."""
    files.check_regular(path)
    try:
        found = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise UserError(
            f"{path} is not a tokenizer ({error}): give {', '.join(HUB)} or a tokenizer.json, or"
            " omit it to train one on the text."
        ) from None
    return ready(found, end)


def ready(tokenizer: Tokenizer, end: str = "") -> Tokenizer:
    """The tokenizer, set to encode whole texts; `end` or its own token stands between documents."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    begins = [end_of(tokenizer, end)[0]] if end else tokenizer.encode("").tokens[:1]
    tokenizer.post_processor = None
    listed = next((x for x in ENDS if tokenizer.token_to_id(x) is not None), None)
    if begins and begins != [listed]:
        begin_with(begins[0], tokenizer)  # so that all who read a copy have the same token
    return tokenizer


def begin_with(word: str, tokenizer: Tokenizer) -> None:
    """Lets a tokenizer say in its file, as LLaMA's does, which token begins a text."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{word} $A",
        pair=f"{word} $A {word} $B",
        special_tokens=[(word, tokenizer.token_to_id(word))],
    )


def end_of(tokenizer: Tokenizer, end: str = "") -> tuple[str, int]:
    """The token that stands between documents and begins each, and its id."""
    words = [end] if end else [*tokenizer.encode("").tokens[:1], *ENDS]
    for word in words:
        if (number := tokenizer.token_to_id(word)) is not None:
            return word, number
    raise UserError(
        f"the tokenizer has no token {' or '.join(words)}: give the one of its own that is to stand"
        " between documents as --data.end-token."
    )


def encode(tokenizer: Tokenizer, documents: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
    """Each document with its ids, the first of which starts a document; refuses a loss of text."""
    # Tokens that were added to a vocabulary may swallow the spaces around them.
    added = (token.content for token in tokenizer.get_added_tokens_decoder().values())
    probe = PROBE + "".join(f"x  {word}  x" for word in added)
    words, ids = tokenizer.get_vocab().values(), ids_of(tokenizer, [probe])[0]
    again = tokenizer.decode(ids, skip_special_tokens=False)
    if again not in (probe, f" {probe}") or max(words) >= len(words):
        raise UserError(
            "the tokenizer loses or changes some text, or leaves out numbers in its vocabulary:"
            " give one that has tokens for all bytes, or omit it to train one."
        )
    (_, end), waiting = end_of(tokenizer), iter(documents)
    while batch := list(itertools.islice(waiting, 256)):  # enough for all cores, and little memory
        for document, ids in zip(batch, ids_of(tokenizer, batch), strict=True):
            yield document, [end, *ids]


def ids_of(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of each text."""
    try:
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except Exception as error:  # the package raises nothing narrower
        raise UserError(
            f"the tokenizer cannot encode some text ({error}): give one that has tokens for all"
            " bytes, or omit it to train one."
        ) from None
    return [encoding.ids for encoding in found]
