"""`examples/train_minimal.py`: one short file, and the same losses on one device and on eight."""

import ast
import dataclasses
import re

import jax
import numpy as np
import pytest
from flax import nnx

from examples import train_minimal
from tests.support.documents import ROOT, imported

FILE = ROOT / "examples" / "train_minimal.py"
TOY = {"layers": 1, "width": 32, "context": 16, "batch": 8, "steps": 12, "log_every": 2}
SAMPLE = {"eval_batches": 2, "prompt": "The ", "sample_bytes": 20}


def losses(printed):
    return [float(x) for x in re.findall(r"loss (\S+?),? ", printed)]


@pytest.fixture(scope="module")
def config(text):
    return train_minimal.Config(text=str(text), **TOY, **SAMPLE)


def test_one_device_and_eight_print_the_same_losses_and_sample(config, capsys):
    printed = []
    for n in (1, 8):
        train_minimal.train(config, jax.devices()[:n])
        printed.append(capsys.readouterr().out)
    one, eight = printed
    assert "each receives" in eight and "each receives" not in one
    assert re.search(r"^blocks/0/up/kernel +32x128 +\(data, model\) +muon ", eight, re.M)
    assert re.search(r"^head/kernel +32x256 +\(data, model\) +adam ", eight, re.M)
    assert len(losses(one)) == 1 + 6 + 1
    np.testing.assert_allclose(losses(one), losses(eight), atol=2e-4)  # four places are printed
    assert losses(one)[-1] < losses(one)[0] - 0.3
    assert one.partition("bits per byte")[2].strip().startswith("The ")


def test_training_text_and_validation_text_are_apart(config, text):
    training, validation = train_minimal.read_text(config.text)
    assert bytes(training) + bytes(validation) == text.read_bytes()
    assert len(validation) == pytest.approx(0.1 * len(training) / 0.9, abs=2)


def test_windows_depend_on_seed_and_step_alone(config):
    text = np.arange(200, dtype=np.uint8)
    first = train_minimal.windows(text, config, 3)
    assert first.shape == (8, 17) and (np.diff(first) == 1).all()
    np.testing.assert_array_equal(first, train_minimal.windows(text, config, 3))
    assert (first != train_minimal.windows(text, config, 4)).any()
    other = dataclasses.replace(config, seed=1)
    assert (first != train_minimal.windows(text, other, 3)).any()


def test_settings_are_read_by_the_type_of_their_default():
    given = train_minimal.parse(["steps=5", "learning_rate=0.1", "prompt=a=b"])
    assert (given.steps, given.learning_rate, given.prompt) == (5, 0.1, "a=b")


def test_an_unknown_setting_is_named():
    with pytest.raises(SystemExit, match="rate=1: give name=value, with a name of text, seed"):
        train_minimal.parse(["rate=1"])


def test_later_bytes_change_no_earlier_logits(config):
    """What `draw` relies on: it computes whole windows before they are full."""
    model = train_minimal.GPT(config, nnx.Rngs(0))
    for block in model.blocks:  # they begin as the identity, which hides attention
        block.out.kernel[...] = block.query.kernel[...]
    graph, params = nnx.split(model)
    forward = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens))
    tokens = np.arange(16)[None]
    changed = np.where(tokens < 9, tokens, 0)
    with jax.set_mesh(train_minimal.make_mesh(jax.devices()[:1])):
        before, after = (np.asarray(forward(params, x)) for x in (tokens, changed))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any()


def test_it_is_one_short_file_that_imports_nothing_from_its_folder():
    assert len(FILE.read_text().splitlines()) <= 250
    packages = {name.partition(".")[0] for name in imported(FILE)}
    assert {"jax", "flax", "optax", "numpy", "optax_muonplus"} <= packages
    assert not packages & {"examples", *(path.stem for path in FILE.parent.iterdir())}
    private = [
        node.attr
        for node in ast.walk(ast.parse(FILE.read_text()))
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr)
    ]
    assert private == []
