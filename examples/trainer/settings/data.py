"""The settings of a text, and how it is turned into tokens."""

import dataclasses
from typing import Annotated, Literal

from pydantic import Field

from examples.trainer.settings.validation import STRICT


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text, and how it is turned into tokens."""

    __pydantic_config__ = STRICT

    source: Literal["documentation", "files", "fineweb", "bin"] = "files"
    """documentation: what Python says of itself, unless paths are given; files: those of paths, or
    the source of Python's standard library; fineweb: streamed from the Hugging Face hub; bin:
    tokens in .bin files of paths, as nanoGPT or modded-nanogpt writes them."""
    paths: tuple[str, ...] = ()
    """Text files, or folders searched for .txt, .md, .py, .jsonl and .ndjson; copies of a document
    count once."""
    text_field: str = "text"
    """Where the rows of .jsonl files have their text; each row is a document."""
    max_bytes: Annotated[int, Field(ge=1)] = 16_000_000
    """Read at most this many bytes of files, in a fixed random order; they are held in memory."""
    tokens: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1e9
    """Training tokens to take from fineweb; validation tokens come on top."""
    tokenizer: str = ""
    """gpt2, llama2 or a tokenizer.json; empty: trained on the text of files,
    else gpt2."""
    end_token: str = ""
    """The token that stands between documents, as <|end_of_text|>; empty: the one that the
    tokenizer puts before texts, else the first of <|endoftext|>, <s>, </s> that it has."""
    vocab_size: Annotated[int, Field(ge=257)] = 2048
    """Tokens of a tokenizer that is trained, at least 257 (each byte and the end of a text)."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the text that is held out for validation."""
