"""The tokenizer: a lossless byte-level BPE trained on the given text, or a named one."""

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from examples.trainer.system.errors import DamagedFileError, UserError
from examples.trainer.system.files import write_atomically

END = "<|endoftext|>"
# Tokens that stand between documents, of tokenizers that name none: the first one found is used.
ENDS = (END, "<s>", "</s>")
# Files of a model that name such a token, by itself or by its number; the first is the surest.
BESIDE = ("tokenizer_config", "special_tokens_map", "config", "generation_config")
# Where a tokenizer is, and its token between documents. Access to Meta's own LLaMA-2 tokenizer is
# gated; this copy is free.
HUB = {
    "gpt2": ("openai-community/gpt2", END),
    "llama2": ("hf-internal-testing/llama-tokenizer", "<s>"),
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


def named(name: str, folder: Path, end: str = "") -> Tokenizer:
    """A tokenizer from the hub or a file; downloads are kept in `folder`, which must exist."""
    if name not in HUB:
        if not (path := file_of(name)).is_file():
            raise UserError(
                f"--data.tokenizer {name} is neither {' nor '.join(HUB)} nor a tokenizer.json nor a"
                " folder with one: give one of them, or omit it to train one on the text."
            )
        return load(path, end)
    path = folder / f"{name}.json"
    if not path.exists():
        there, _ = HUB[name]
        try:
            content = Tokenizer.from_pretrained(there).to_str().encode()
        except Exception as error:  # of the network, of the hub, of the file: no common class
            raise unreachable(f"the tokenizer {there}", error) from None
        write_atomically(path, content)
    return load(path, end)


def file_of(name: str) -> Path:
    """The file of a tokenizer, which may be named by its folder."""
    return Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)


def load(path: Path, end: str = "") -> Tokenizer:
    """A saved tokenizer, set to encode END inside a text as plain text.

    `end` is to stand between documents. By default that is what a file of `BESIDE` names, then what
    the tokenizer itself puts before texts, then the first of `ENDS`.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise DamagedFileError(f"{path} is not a tokenizer: {error}.") from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if not (words := tokenizer.get_vocab()):
        raise UserError(f"{path} has no words: give another --data.tokenizer.")
    if max(words.values()) >= tokenizer.get_vocab_size():
        raise UserError(f"{path} leaves out numbers in its vocabulary: give one that does not.")
    if end and tokenizer.token_to_id(end) is None:
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        has = f"has {', '.join(special[:8])} and its words" if special else "has words alone"
        raise UserError(f"--data.end-token {end}: {path} {has}: give one of them.")
    word = end or named_beside(path, tokenizer) or next(iter(starts(tokenizer)), None)
    tokenizer.post_processor = None
    listed = next((x for x in ENDS if tokenizer.token_to_id(x) is not None), None)
    if word not in (None, listed):
        begin_with(word, tokenizer)  # so that all who read a copy have the same token
    return tokenizer


def named_beside(path: Path, tokenizer: Tokenizer) -> str | None:
    """The token that files beside a tokenizer say begins a text or, if none does, ends it."""
    special = tokenizer.get_added_tokens_decoder()
    for file in filter(Path.is_file, (path.with_name(f"{x}.json") for x in BESIDE)):
        try:
            values = dict(json.loads(file.read_bytes()))
        except (ValueError, TypeError) as error:
            raise DamagedFileError(f"{file} is no JSON object: {error}.") from None
        for kind in ("bos_token", "eos_token"):
            word, ids = values.get(kind), values.get(f"{kind}_id")
            words = [word.get("content") if isinstance(word, dict) else word]
            # A number that is no special token was left at the default of another vocabulary.
            ids = ids if isinstance(ids, list) else [ids]
            words += [special[i].content for i in ids if isinstance(i, int) and i in special]
            for found in words:
                if isinstance(found, str) and tokenizer.token_to_id(found) is not None:
                    return found
    return None


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
    """The ids of each text; raises `UserError` for one that the tokenizer cannot encode."""
    try:
        for text in texts:
            text.encode()
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in found]
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
