"""Loss of a trained model on any text: `python -m examples.perplexity runs/NAME --texts FILE`."""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import tyro

from examples.trainer.data import corpus, tokenizer
from examples.trainer.data.corpus import texts
from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef, TrainedModel, score, windows
from examples.trainer.system.errors import UserError
from examples.trainer.system.exit_status import command
from examples.trainer.training import evaluate
from examples.trainer.training.evaluate import bits_per_byte, in_words, loses_text, short


@dataclass(frozen=True)
class Measured:
    """The loss on all texts together."""

    loss: float
    """Nats per token."""
    tokens: int
    """Predicted tokens: all but the first."""
    bytes: int
    lost: float | None = None
    """The share of the text that its tokens do not give back."""

    def __str__(self) -> str:
        bits = bits_per_byte(self.loss, self.tokens, self.bytes)
        lost = f", of which {self.lost:.1%} are lost" if loses_text(self.lost) else ""
        return "\n".join(
            [
                f"loss           {self.loss:.4f} nats per token",
                f"perplexity     {short(evaluate.perplexity(self.loss))}",
                f"bits per byte  {in_words(None if lost else bits, 4)}",
                f"text           {self.bytes:,} bytes{lost}, {self.tokens:,} tokens",
            ]
        )


def perplexity(
    checkpoint: Annotated[CheckpointRef, tyro.conf.arg(name="")],
    paths: Annotated[tuple[str, ...], tyro.conf.arg(name="texts")],
    text_field: str = "text",
    max_bytes: int = 16_000_000,
    batch_size: int = 16,
) -> Measured:
    """Measures how well a trained model predicts texts.

    The texts are concatenated, each after the token that starts a document, and cut into windows of
    the model's context. A token is predicted from the earlier tokens of its window.

    Args:
      checkpoint: the model.
      paths: text files, or folders of .txt, .md, .py, .jsonl, .ndjson and .parquet.
      text_field: field of .jsonl and .parquet rows that holds the text.
      max_bytes: read at most this much.
      batch_size: number of windows at a time.
    """
    if not paths:
        raise UserError("--texts is empty: give the text files to measure.")
    if min(max_bytes, batch_size) < 1:
        raise UserError("--max-bytes and --batch-size: give at least 1.")
    found = itertools.chain.from_iterable(
        texts(path, max_bytes, text_field) for path in corpus.named_files(paths)
    )
    return measure(trained.load(checkpoint), list(head(found, max_bytes)), batch_size)


def head(documents: itertools.chain[str], size: int) -> list[str]:
    """The first documents, up to so many bytes of text."""
    kept = []
    for document in documents:
        content = document.encode()[:size]
        kept.append(content.decode(errors="ignore"))
        size -= len(content)
        if size <= 0:
            break
    return [text for text in kept if text.strip()]


def measure(model: TrainedModel, documents: Sequence[str], batch_size: int) -> Measured:
    """The mean over all tokens of some texts."""
    if not documents:
        raise UserError("there is no text in these files.")
    back, ids = tokenizer.RoundTrip(model.tokenizer), []
    for text, document in tokenizer.encode(model.tokenizer, documents):
        back.add(text, document)
        ids += document
    rows = windows(ids, model.config.model.context)
    nats = np.concatenate([nats for nats, _ in score(model, rows, min(batch_size, len(rows)))])
    size = sum(len(document.encode()) for document in documents)
    return Measured(float(nats.mean()), len(nats), size, back.share)


main = command(perplexity, "examples.perplexity")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
