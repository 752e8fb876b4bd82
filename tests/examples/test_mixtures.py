"""Mixtures: which row is from which text, what each text gives, and what cannot be mixed."""

import dataclasses

import jax
import numpy as np
import pytest

from examples.trainer.data import mixture, tokenizer
from examples.trainer.data.loader import Loader
from examples.trainer.data.mixture import BLOCK, Mixture, loader_of
from examples.trainer.data.prepare import prepare
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.run import DataConfig, RunConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import sharding
from examples.trainer.training.evaluate import make_evaluate
from tests.support import texts
from tests.support.trainer import quiet

SIZES, COUNTS = (700, 50, 3), (2600, 1400, 96)  # windows of a text, its rows in a block
# The k-th text counts from 10,000 k, so that a token says where it is from.
LOADERS = [
    Loader(np.arange(4 * n + 1) + 10_000 * k, 4, 128, seed=2, stream=k) for k, n in enumerate(SIZES)
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
    assert MIXTURE.epochs(BLOCK // 128) == pytest.approx(np.divide(COUNTS, SIZES))


def test_targets_are_the_next_tokens():
    inputs, targets = MIXTURE.batch(9)
    assert inputs.shape == targets.shape == (128, 4) and inputs.dtype == np.int32
    np.testing.assert_array_equal(targets, inputs + 1)


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
    ("given", "said"),
    [
        (["a"], "--data.mixture a: give SOURCE=WEIGHT with a positive weight"),
        (["a=x"], "--data.mixture a=x: give SOURCE=WEIGHT"),
        (["=1"], "--data.mixture =1: give SOURCE=WEIGHT"),
        (["a=0"], "--data.mixture a=0: give"),
        (["a=-1"], "--data.mixture a=-1: give"),
        (["a=nan"], "--data.mixture a=nan: give"),
        (["a=inf"], "--data.mixture a=inf: give"),
        (["a=1", "a=2"], "names a twice"),
        (["a=1", "b=1e-5"], "b=1e-05 is too little for one row of 4096: give a larger weight"),
        (["nowhere=1"], "nowhere: there is no such folder. Give one that"),
    ],
)
def test_what_is_no_mixture_is_refused(given, said):
    with pytest.raises(UserError) as error:
        prepare(DataConfig(mixture=tuple(given)), quiet)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"paths": ("b",)}, "--data.mixture reads no --data.paths: give one of them"),
        ({"hub": "b"}, "--data.hub reads no --data.mixture: give one of them"),
        ({"order": "numpy"}, "--data.order numpy has no mixtures"),
    ],
)
def test_settings_that_name_several_texts_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        prepare(DataConfig(mixture=("a=1",), **changes), quiet)


# Texts on disk


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
    assert found.train.size == web.train.size + code.train.size
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


def test_each_text_needs_a_row(folder):
    asked = config(folder, "web=1", "code=1")
    found = prepare(asked.data, quiet)
    long = dataclasses.replace(asked, model=ModelConfig(context=100_000))
    with pytest.raises(UserError, match=r"too little training text in .*web: .* row of it needs 1"):
        loader_of(long, found)


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
        sizes.append(part.val.bytes / part.val.size)
    figures = evaluated(asked, found).figures()
    assert [figures[f"val_loss/{part.name}"] for part in found.parts] == pytest.approx(each)
    loss, size = (np.dot(x, [0.75, 0.25]) for x in (each, sizes))
    assert figures["val_loss"] == pytest.approx(loss)
    assert figures["val_bits_per_byte"] == pytest.approx(loss / np.log(2) / size)


def test_each_text_needs_a_batch_for_validation(folder):
    asked = config(folder, "web=1", "code=1", batch_size=4000)
    with pytest.raises(UserError, match=r"too little validation text in .*web: "):
        evaluated(asked, prepare(asked.data, quiet))
