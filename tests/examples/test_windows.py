"""Which windows a step reads: a new order in each epoch, which never changes."""

import hashlib

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from examples.trainer.data import tokenizer
from examples.trainer.data.loader import Loader, check_enough, order
from examples.trainer.data.prepare import prepare
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import UserError
from tests.support.trainer import quiet

LOADER = Loader(np.arange(10 * 4 + 1, dtype=np.uint16), context=4, batch_size=3, seed=6)


def windows(loader, steps, context=4):
    """The numbers of the windows that are read."""
    return np.concatenate([loader.batch(step)[0][:, 0] // context for step in steps])


def test_batches_have_the_windows_of_the_order():
    found = windows(LOADER, range(10)).reshape(3, 10)
    np.testing.assert_array_equal(found, [order(10, 6, epoch) for epoch in range(3)])
    assert (np.sort(found) == np.arange(10)).all() and (found[0] != found[1]).any()
    assert (order(10, 7, 0) != order(10, 6, 0)).any()


def test_targets_are_the_next_tokens_and_processes_read_parts_of_a_batch():
    inputs, targets = LOADER.batch(7)
    assert inputs.shape == targets.shape == (3, 4) and inputs.dtype == np.int32
    np.testing.assert_array_equal(targets, inputs + 1)  # the text counts up
    parts = [LOADER.batch(7, rows=range(*ends)) for ends in ((0, 1), (1, 3))]
    np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), inputs)


def test_a_batch_needs_its_text():
    with pytest.raises(UserError, match="too little validation text: 41 tokens, and it needs"):
        check_enough(Loader(LOADER.ids, 4, 11, 0), "validation")


# Windows of steps 0, 1, 249 and 250, with which an epoch begins, by seed. Runs that were stopped
# go on with these, and experiments that are half done compare runs on these.
STORED = {
    0: "459 206 222 162 711 814 350 890 504 801 975 607 144 255 317 766",
    7: "816 923 151 900 213 100 851 503 444 661 425 651 513 857 583 397",
}


@pytest.mark.parametrize("seed", STORED)
def test_windows_never_change(seed):
    loader = Loader(np.arange(64 * 1000 + 1, dtype=np.uint16), 64, 4, seed)
    found = windows(loader, [0, 1, 249, 250], 64)
    assert found.tolist() == [int(number) for number in STORED[seed].split()]


SHA256 = {
    "train": "69d027ab988093d8683d4a92ffa90e7dd2d13dc1ed5cadf70ef024241ef158ae",
    "val": "1fa20089b457c672b78936755f00067a6e84997f6e0ee90e326a301865dc76dc",
}


def test_the_key_of_a_text_never_changes(tmp_path, monkeypatch):
    """A run that is resumed compares it, and so does a sweep that goes on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({tokenizer.END: 0, **{c: i for i, c in enumerate(letters, 1)}}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(tmp_path / "words.json"))
    for i in range(9):
        (tmp_path / f"{i}.md").write_text(f"text {i} of some words\n" * 40)
    given = str(tmp_path / "words.json")
    found = prepare(DataConfig(paths=(str(tmp_path),), tokenizer=given, val_fraction=0.2), quiet)
    for split, expected in SHA256.items():
        digest = getattr(found, split).digest
        assert hashlib.sha256(digest.encode()).hexdigest() == expected
    words = hashlib.sha256(found.tokenizer.to_str().encode()).hexdigest()
    key = hashlib.sha256(" ".join((words, *SHA256.values())).encode()).hexdigest()[:16]
    assert found.key == key
