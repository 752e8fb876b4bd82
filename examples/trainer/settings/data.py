"""The settings of a text, and how it is turned into tokens.

The docstring below a field is what `--help` shows for it.
"""

import dataclasses
from typing import Annotated, Any, Literal

import pydantic
import tyro
from pydantic import Field

from examples.trainer.settings.validation import STRICT

Order = Literal["feistel-1", "numpy"]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text, and how it is turned into tokens."""

    __pydantic_config__ = STRICT

    source: Literal["files", "fineweb", "prepared", "bin"] = "files"
    """files: those of paths, or the default text; fineweb: streamed from the Hugging Face hub;
    prepared: the folder that `python -m examples.data prepare` has made; bin: tokens in .bin files
    of paths, as nanoGPT or modded-nanogpt writes them."""
    paths: tuple[str, ...] = ()
    """Text files, or folders searched for .txt, .md, .py, .jsonl, .ndjson and .parquet; empty:
    Python's standard library."""
    hub: Annotated[str, tyro.conf.arg(metavar="NAME[:CONFIG[:SPLIT]]")] = ""
    """In the place of source: a dataset of the Hugging Face hub, streamed; NAME::SPLIT for one that
    has no configurations. The split is train by default."""
    mixture: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SOURCE=WEIGHT ...")] = ()
    """In the place of source: several texts, and which share of the rows is from each, as a=0.7
    b=0.3. SOURCE: a folder that `python -m examples.data prepare` has made or one of .bin files, or
    hub:NAME. Each is read in its own order, and all have one tokenizer."""
    text_field: str = "text"
    """Where the rows of .jsonl and .parquet files, and of datasets of the hub, have their text;
    each row is a document."""
    max_bytes: Annotated[int, Field(ge=1)] = 16_000_000
    """Read at most this many bytes of files, in a fixed random order; they are held in memory."""
    tokens: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1e9
    """Training tokens to take from fineweb or the hub; validation tokens come on top."""
    tokenizer: str = ""
    """gpt2, llama2, a tokenizer.json or a folder with one; empty: trained on the text of files,
    else gpt2."""
    end_token: str = ""
    """The token that stands between documents, as <|end_of_text|>; empty: the one that the files
    beside a tokenizer.json or itself say begins a text, else the first of <|endoftext|>, <s>,
    </s>."""
    vocab_size: Annotated[int, Field(ge=257)] = 2048
    """Tokens of a tokenizer that is trained, at least 257 (each byte and the end of a text)."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the text that is held out for validation."""
    document_mask: bool = False
    """Mask documents from each other: a token sees those of its own document only, and positions
    count from its start. A document begins with the token that stands between documents."""
    verify: bool = False
    """Check all tokens against their hashes at the start, also for texts above 256 MB; this reads
    them once."""
    order: Order = "feistel-1"
    """The random order in which windows of the text are read. feistel-1: computed for each window,
    by integers alone; numpy: that of earlier versions, from a generator of NumPy, in memory."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def complete(cls, saved: Any) -> Any:
        """Gives settings that were saved before there was a choice of the order that of then."""
        if not isinstance(saved, dict):
            return saved
        # Under a validator of the whole, pydantic takes no list of JSON for a tuple.
        tuples = {name: tuple(x) for name, x in saved.items() if isinstance(x, list)}
        return {"order": "numpy", **saved, **tuples}

    @property
    def trains_tokenizer(self) -> bool:
        """Whether a tokenizer is trained on the text if none is given."""
        return self.source == "files" and not (self.hub or self.mixture)
