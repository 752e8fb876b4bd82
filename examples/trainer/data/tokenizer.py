"""The tokenizer: a lossless byte-level BPE trained on the given text, or a named one."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.trainer.system.errors import DamagedFileError, UserError
from examples.trainer.system.files import write_atomically

END = "<|endoftext|>"
# Tokens that stand between documents: of `train` and GPT-2, of LLaMA. The first one found is used.
ENDS = (END, "<s>", "</s>")
HUB = {  # access to Meta's own LLaMA-2 tokenizer is gated; this copy is free
    "gpt2": "openai-community/gpt2",
    "llama2": "hf-internal-testing/llama-tokenizer",
}
CHECKED_BYTES = 1_000_000  # of the validation text
SAMPLE_BYTES = 2_000_000  # text to learn merges from; more takes longer and changes little


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


def named(name: str, folder: Path) -> Tokenizer:
    """A tokenizer from the hub or a file; downloads are kept in `folder`, which must exist."""
    if name not in HUB:
        if not Path(name).is_file():
            raise UserError(
                f"--data.tokenizer {name} is neither {' nor '.join(HUB)} nor a tokenizer.json: "
                "give one of them, or omit it to train one on the text."
            )
        return load(Path(name))
    path = folder / f"{name}.json"
    if not path.exists():
        try:
            content = Tokenizer.from_pretrained(HUB[name]).to_str().encode()
        except Exception as error:  # of the network, of the hub, of the file: no common class
            raise unreachable(f"the tokenizer {HUB[name]}", error) from None
        write_atomically(path, content)
    return load(path)


def load(path: Path) -> Tokenizer:
    """A saved tokenizer, set to encode END inside a text as plain text."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise DamagedFileError(f"{path} is not a tokenizer: {error}.") from None
    tokenizer.encode_special_tokens = True
    # LLaMA's post-processor would add a start token to every text; `encode` adds it itself.
    tokenizer.post_processor = None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if not (words := tokenizer.get_vocab()):
        raise UserError(f"{path} has no words: give another --data.tokenizer.")
    if max(words.values()) >= tokenizer.get_vocab_size():
        raise UserError(f"{path} leaves out numbers in its vocabulary: give one that does not.")
    return tokenizer


def end_id(tokenizer: Tokenizer) -> int:
    """The id of the token that stands between documents."""
    ids = [i for i in map(tokenizer.token_to_id, ENDS) if i is not None]
    if not ids:
        raise UserError(
            f"the tokenizer has none of {', '.join(ENDS)} to stand between documents: give "
            "another --data.tokenizer."
        )
    return ids[0]


def encode(tokenizer: Tokenizer, documents: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
    """Each document with its ids; the ids begin with the token that starts a document."""
    end = end_id(tokenizer)
    waiting = iter(documents)
    while batch := list(itertools.islice(waiting, 256)):  # enough for all cores, and little memory
        for document, ids in zip(batch, ids_of(tokenizer, batch), strict=True):
            yield document, [end, *ids]


def ids_of(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of each text; raises `UserError` for one that the tokenizer cannot encode."""
    try:
        for text in texts:
            text.encode()
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    except UnicodeEncodeError as error:  # of a command line
        raise UserError(f"{texts[0][:40]!r} is not UTF-8 text ({error.reason}).") from None
    except Exception as error:  # the package raises nothing narrower
        raise UserError(
            f"the tokenizer has no tokens for some of the text ({error}): give another"
            " --data.tokenizer, which has a word for what it does not know, or all bytes."
        ) from None


@dataclass
class RoundTrip:
    """How much of a text comes back from its tokens, found on its first CHECKED_BYTES."""

    tokenizer: Tokenizer
    bytes: int = 0
    lost: int = 0
    """Bytes of the lines that do not come back."""

    def add(self, text: str, ids: list[int]) -> None:
        """Decodes a document, whose ids begin with the token that starts a document."""
        if self.bytes >= CHECKED_BYTES:
            return
        self.bytes += len(text.encode())
        if not same(self.tokenizer.decode(ids[1:], skip_special_tokens=False), text):
            lines = text.splitlines(keepends=True)
            coded = ids_of(self.tokenizer, lines)
            decoded = self.tokenizer.decode_batch(coded, skip_special_tokens=False)
            pairs = zip(lines, decoded, strict=True)
            self.lost += sum(len(line.encode()) for line, back in pairs if not same(back, line))

    @property
    def share(self) -> float | None:
        """The share of the text that is lost; None without a text."""
        return self.lost / self.bytes if self.bytes else None


def same(decoded: str, text: str) -> bool:
    """Whether a text came back; some tokenizers put a space before it."""
    return decoded in (text, f" {text}")


def unreachable(what: str, error: Exception) -> UserError:
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Its second line may have the names that there are.
    reason = " ".join(said[:2] or [type(error).__name__]).rstrip(".")
    return UserError(
        f"cannot get {what} from the Hugging Face hub: {reason}. If there is no network here, "
        "train on files, as --data.paths FILES, or on the default text, both without "
        "--data.source and --data.hub; a tokenizer can be given as --data.tokenizer "
        "PATH/tokenizer.json."
    )
