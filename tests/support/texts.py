"""One text as every source has it: prepared folders, .bin files, and a folder as on the hub.

Also a tokenizer as LLaMA 3 has it, with the files beside it.
"""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from examples import data
from examples.trainer.data import tokenizer


def documents(seed: int, count: int = 60) -> list[str]:
    """Documents of words that no document of another seed has."""
    rows = np.random.default_rng(seed).integers(30, size=(count, 40))
    return [" ".join(f"{chr(97 + seed)}{i}" for i in row) for row in rows]


def make_tokenizer(path: Path) -> Path:
    """Writes a tokenizer of 300 tokens for documents of the first seeds."""
    tokenizer.train((text for seed in range(3) for text in documents(seed, 9)), 300).save(str(path))
    return path


def prepared(folder: Path, words: Path, seed: int) -> Path:
    """A folder of `examples.data prepare`."""
    rows = folder.with_suffix(".jsonl")
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(seed)))
    given = ["--out", folder, "--paths", rows, "--tokenizer", words, "--val-fraction", "0.3"]
    assert data.main(["prepare", *map(str, given)]) == 0
    return folder


def bins(folder: Path, words: Path, seed: int) -> Path:
    """A folder of .bin files, without headers."""
    folder.mkdir()
    made = tokenizer.load(words)
    for split, texts in (("train", documents(seed)[:40]), ("val", documents(seed)[40:])):
        ids = [i for _, own in tokenizer.encode(made, texts) for i in own]
        np.asarray(ids, "<u2").tofile(folder / f"{split}.bin")
    return folder


def as_on_the_hub(folder: Path, seed: int, field: str = "text") -> Path:
    """A folder that `datasets` reads as it reads a repository of the hub."""
    folder.mkdir()
    rows = [{"id": i, field: text} for i, text in enumerate(documents(seed))]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def of_two_kinds(root):
    """A tokenizer, a prepared folder `web` and one with .bin files, `code`."""
    words = make_tokenizer(root / "tokenizer.json")
    prepared(root / "web", words, 0)
    bins(root / "code", words, 1)


BEGIN, END, TURN = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"


def like_llama_3(
    folder: Path, special: tuple[str, ...] = (BEGIN, END, TURN), begins: str = BEGIN, **beside: dict
) -> Path:
    """Writes a tokenizer.json with the special tokens from 256 on, and files beside it by name."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    if begins:
        first = [(begins, made.token_to_id(begins))]
        template = processors.TemplateProcessing(f"{begins} $A", None, first)
        made.post_processor = processors.Sequence([processors.ByteLevel(), template])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder / "tokenizer.json"
