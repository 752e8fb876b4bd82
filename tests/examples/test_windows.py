"""Which windows a step reads: orders without memory, those of earlier runs, and mixtures."""

import collections
import dataclasses
import hashlib
import math
import tracemalloc

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from examples.trainer.data import mixture, tokenizer
from examples.trainer.data.loader import Loader, feistel
from examples.trainer.data.mixture import BLOCK, Mixture, loader_of
from examples.trainer.data.prepare import prepare
from examples.trainer.settings.data import DataConfig
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.run import RunConfig
from examples.trainer.settings.validation import from_dict
from examples.trainer.system.errors import UserError
from examples.trainer.training import sharding
from examples.trainer.training.evaluate import make_evaluate
from tests.support import texts
from tests.support.trainer import quiet

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 101, 1023, 1024, 1025, 4096, 30_011)


MODULUS = 2**64


def permutation(size, seed=0, epoch=0, stream=0):
    """All images."""
    return feistel(np.arange(size), size, seed, np.full(size, epoch), stream)


def splitmix(x):
    """Transcribes the function of SplitMix64 in Python's integers."""
    x = (x + 0x9E3779B97F4A7C15) % MODULUS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % MODULUS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % MODULUS
    return x ^ (x >> 31)


def image(x, size, seed, epoch, stream):
    """Transcribes the equations of `order` for one index."""
    key = splitmix(splitmix(splitmix(seed) ^ epoch) ^ stream)
    a = math.isqrt(size - 1) + 1
    a += a % 2
    b = math.ceil(size / a)
    while True:
        left, right = x % a, x // a
        for t in range(0, 16, 2):
            left = (left + splitmix(splitmix(key ^ t) ^ right)) % a
            right = (right + splitmix(splitmix(key ^ (t + 1)) ^ left)) % b
        x = left + a * right
        if x < size:
            return x


def test_splitmix_has_the_published_numbers():
    # The first two for this seed, as in Rosetta Code, Pseudo-random numbers/Splitmix64.
    numbers = [splitmix(1234567 + i * 0x9E3779B97F4A7C15) for i in range(2)]
    assert numbers == [6457827717110365317, 3203168211198807973]


@pytest.mark.parametrize("size", SIZES)
def test_images_are_those_of_the_equations_and_each_is_there_once(size):
    found = permutation(size, seed=3, epoch=5, stream=7)
    some = range(0, size, max(1, size // 40))
    assert [found[i] for i in some] == [image(i, size, 3, 5, 7) for i in some]
    np.testing.assert_array_equal(np.sort(found), np.arange(size))


def test_any_index_of_any_size_takes_no_memory():
    size = 2**60 - 1
    index = np.array([0, 1, 10**12, size - 1])
    tracemalloc.start()
    try:
        found = feistel(index, size, 0, np.zeros(4, int))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 50_000
    assert found.tolist() == [image(i, size, 0, 0, 0) for i in index.tolist()]


def test_epochs_seeds_and_streams_have_orders_of_their_own():
    """All permutations of four windows are about equally frequent, whichever of them changes."""
    for axis in ("epoch", "seed", "stream"):
        found = collections.Counter(tuple(permutation(4, **{axis: i})) for i in range(2400))
        # 100 each on average, with a standard deviation of 10.
        assert len(found) == 24 and max(abs(count - 100) for count in found.values()) < 45


LOADER = Loader(np.arange(10 * 4 + 1, dtype=np.uint16), context=4, batch_size=3, seed=6)


def windows(loader, steps, context=4):
    """The numbers of the windows that are read."""
    return np.concatenate([loader.batch(step)[0][:, 0] // context for step in steps])


def test_batches_have_the_windows_of_the_order():
    found = windows(LOADER, range(10)).reshape(3, 10)
    np.testing.assert_array_equal(found, [permutation(10, 6, epoch) for epoch in range(3)])


def test_the_earlier_order_is_that_of_numpy():
    found = windows(dataclasses.replace(LOADER, order="numpy"), range(10)).reshape(3, 10)
    expected = [np.random.default_rng((6, epoch)).permutation(10) for epoch in range(3)]
    np.testing.assert_array_equal(found, expected)


def test_targets_are_the_next_tokens_and_processes_read_parts_of_a_batch():
    inputs, targets = LOADER.batch(7)
    assert inputs.shape == targets.shape == (3, 4) and inputs.dtype == np.int32
    np.testing.assert_array_equal(targets, inputs + 1)  # the text counts up
    parts = [LOADER.batch(7, rows=range(*ends)) for ends in ((0, 1), (1, 3))]
    np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), inputs)


# Windows of steps 0, 1, 249 and 250, with which an epoch begins, by order and seed. Runs that were
# stopped go on with these, and experiments that are half done compare runs on these.
STORED = {
    ("numpy", 0): "459 206 222 162 711 814 350 890 504 801 975 607 144 255 317 766",
    ("numpy", 7): "816 923 151 900 213 100 851 503 444 661 425 651 513 857 583 397",
    ("feistel-1", 0): "465 909 798 671 734 271 382 617 681 779 423 448 607 814 408 226",
    ("feistel-1", 7): "895 777 580 137 263 496 794 595 934 952 46 217 979 696 156 279",
}


@pytest.mark.parametrize(("order", "seed"), STORED)
def test_windows_of_an_order_never_change(order, seed):
    loader = Loader(np.arange(64 * 1000 + 1, dtype=np.uint16), 64, 4, seed, order)
    found = windows(loader, [0, 1, 249, 250], 64)
    assert found.tolist() == [int(number) for number in STORED[order, seed].split()]


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
    made.save(str(tmp_path / "words.json"))
    for i in range(9):
        (tmp_path / f"{i}.md").write_text(f"text {i} of some words\n" * 40)
    given = str(tmp_path / "words.json")
    found = prepare(DataConfig(paths=(str(tmp_path),), tokenizer=given, val_fraction=0.2), quiet)
    assert (found.train.meta.sha256, found.val.meta.sha256) == (SHA256["train"], SHA256["val"])
    words = hashlib.sha256(found.tokenizer.to_str().encode()).hexdigest()
    key = hashlib.sha256(" ".join((words, *SHA256.values())).encode()).hexdigest()[:16]
    assert found.key == key


def test_settings_without_an_order_mean_the_earlier_one():
    assert from_dict(DataConfig, {"paths": ["a"]}) == DataConfig(paths=("a",), order="numpy")
    now = dataclasses.asdict(DataConfig(paths=("a", "b")))
    assert from_dict(DataConfig, now).order == "feistel-1"


# Mixtures


WINDOWS, COUNTS = (700, 50, 3), (2600, 1400, 96)  # windows of a text, its rows in a block


# The k-th text counts from 10,000 k, so that a token says where it is from.
LOADERS = [
    Loader(np.arange(4 * n + 1) + 10_000 * k, 4, 128, seed=2, stream=k)
    for k, n in enumerate(WINDOWS)
]


MIXTURE = Mixture(tuple(LOADERS), COUNTS)


def firsts(steps):
    """The first token of each row."""
    return np.concatenate([MIXTURE.batch(step)[0][:, 0] for step in steps])


def test_every_block_has_the_rows_of_each_text_in_an_order_of_its_own():
    found = firsts(range(3 * BLOCK // 128)).reshape(3, BLOCK) // 10_000
    for block in found:
        assert tuple(np.bincount(block)) == COUNTS
    assert 1300 < (found[0] != found[1]).sum() < 2700  # of shuffled blocks about 2060
    # Within a block, too: no stretch is without the texts that have many rows.
    halves = found.reshape(-1, BLOCK // 8)
    assert (np.abs((halves == 0).mean(1) - COUNTS[0] / BLOCK) < 0.08).all()


def test_each_text_is_read_in_its_own_order_and_epochs():
    rows = np.arange(2 * BLOCK)
    source, places = MIXTURE.sources(rows)
    for number, (count, loader) in enumerate(zip(COUNTS, LOADERS, strict=True)):
        own = np.sort(places[source == number])
        np.testing.assert_array_equal(own, np.arange(2 * count))  # each place once
        epochs = loader.read(np.arange(2 * count))[:, 0]
        read = firsts(range(2 * BLOCK // 128))[source == number]
        np.testing.assert_array_equal(read, epochs[places[source == number]])
        seen = np.bincount((epochs - 10_000 * number) // 4)
        assert seen.max() - seen.min() <= 1  # whole epochs, and one that has begun
    assert MIXTURE.epochs(BLOCK // 128) == pytest.approx(np.divide(COUNTS, WINDOWS))


def test_any_step_is_read_at_once_and_in_parts():
    step = 2**31 - 2
    whole = MIXTURE.batch(step)
    parts = [MIXTURE.batch(step, range(*ends)) for ends in ((0, 5), (5, 128))]
    for i in range(2):
        np.testing.assert_array_equal(np.concatenate([part[i] for part in parts]), whole[i])


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        (["a=0.7", "b=0.3"], {"a": 2867, "b": 1229}),
        (["a=b=1", "c=2", "d=1e0"], {"a=b": 1024, "c": 2048, "d": 1024}),
        (["a=1", "b=1", "c=1"], {"a": 1366, "b": 1365, "c": 1365}),
        (["a=1"], {"a": 4096}),
        (["a=1e308", "b=1e308"], {"a": 2048, "b": 2048}),
    ],
)
def test_weights_become_rows_of_a_block(given, rows):
    assert mixture.rows_of(given) == rows


@pytest.mark.parametrize(
    ("given", "changes", "said"),
    [
        ("a", {}, "--data.mixture a: give SOURCE=WEIGHT with a positive weight"),
        ("a=x", {}, "--data.mixture a=x: give SOURCE=WEIGHT"),
        ("=1", {}, "--data.mixture =1: give SOURCE=WEIGHT"),
        ("a=0", {}, "--data.mixture a=0: give"),
        ("a=nan", {}, "--data.mixture a=nan: give"),
        ("a=inf", {}, "--data.mixture a=inf: give"),
        ("a=1 a=2", {}, "names a twice"),
        ("a=1 b=1e-5", {}, "b=1e-05 is too little for one row of 4096: give a larger weight"),
        ("nowhere=1", {}, "nowhere: there is no such folder. Give one that"),
        ("a=1", {"paths": ("b",)}, "--data.mixture reads no --data.paths: give one of them"),
        ("a=1", {"hub": "b"}, "--data.hub reads no --data.mixture: give one of them"),
        ("a=1", {"order": "numpy"}, "--data.order numpy has no mixtures"),
    ],
)
def test_what_is_no_mixture_is_refused(given, changes, said):
    with pytest.raises(UserError) as error:
        prepare(DataConfig(mixture=tuple(given.split()), **changes), quiet)
    assert said in str(error.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer, a prepared folder and one with .bin files."""
    root = tmp_path_factory.mktemp("texts")
    texts.of_two_kinds(root)
    return root


def config(folder, *given, **changes):
    words = str(folder / "tokenizer.json")
    mixture = tuple(f"{folder}/{word}" for word in given)
    return RunConfig(
        data=DataConfig(mixture=mixture, tokenizer=words),
        model=ModelConfig(context=8),
        **{"batch_size": 4, **changes},
    )


def test_folders_are_mixed(folder):
    asked = config(folder, "web=3", "code=1")
    found = prepare(asked.data, quiet)
    loader = loader_of(asked, found)
    web, code = (prepare(mixture.settings_of(part.name, asked.data), quiet) for part in found.parts)
    assert [part.name for part in found.parts] == [f"{folder}/web", f"{folder}/code"]
    assert found.train.meta.tokens == web.train.meta.tokens + code.train.meta.tokens
    read = [loader.batch(step)[0] for step in range(200)]
    letters = [found.tokenizer.decode(row.tolist()) for row in np.concatenate(read)]
    share = np.mean(["a" in text for text in letters])
    assert abs(share - 0.75) < 0.05 and all(("a" in x) != ("b" in x) for x in letters)
    assert prepare(asked.data, quiet).key == found.key
    assert found.key not in {web.key, code.key}
    assert prepare(config(folder, "web=2", "code=1").data, quiet).key != found.key


def test_other_tokenizers_are_refused(folder, tmp_path):
    larger = tokenizer.load(folder / "tokenizer.json")
    larger.add_tokens(["another"])
    larger.save(str(tmp_path / "tokenizer.json"))
    asked = config(folder, "web=1", "code=1").data
    other = dataclasses.replace(asked, tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"tokenizers of .*web and of .*code are not the same"):
        prepare(other, quiet)


def evaluated(asked, found):
    """The evaluation by a loss that is the mean of the tokens."""
    mesh = sharding.make_mesh("", jax.devices()[:1])
    return make_evaluate(lambda _, inputs, targets: inputs.mean(), asked, found, mesh)({})


def test_the_loss_is_the_mean_of_those_of_the_texts_by_weight(folder):
    asked = config(folder, "web=3", "code=1", eval_batches=2)
    found = prepare(asked.data, quiet)
    each, sizes = [], []
    for part in found.parts:
        loader = Loader(part.val.ids, context=8, batch_size=4, seed=0)
        each.append(np.mean([loader.batch(step)[0].mean() for step in range(2)]))
        sizes.append(part.val.meta.bytes / part.val.meta.tokens)
    figures = evaluated(asked, found).figures()
    assert [figures[f"val_loss/{part.name}"] for part in found.parts] == pytest.approx(each)
    loss, size = (np.dot(x, [0.75, 0.25]) for x in (each, sizes))
    assert figures["val_loss"] == pytest.approx(loss)
    assert figures["val_bits_per_byte"] == pytest.approx(loss / np.log(2) / size)


def test_each_text_needs_a_row_and_a_batch_for_validation(folder):
    asked = config(folder, "web=1", "code=1", batch_size=4000)
    found = prepare(asked.data, quiet)
    with pytest.raises(UserError, match=r"too little validation text in .*web: "):
        evaluated(asked, found)
    long = dataclasses.replace(asked, model=ModelConfig(context=100_000))
    with pytest.raises(UserError, match=r"too little training text in .*web: .* row of it needs 1"):
        loader_of(long, found)
