"""The scripts to copy: each runs, trains, and shows which parameter gets which update."""

import dataclasses
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import train_minimal
from tests.support.documents import ROOT, imported

EXAMPLES = ROOT / "examples"

# By script, the parameters that its table has in each group.
GROUPS = {
    "flax_nnx": {
        "muon": {"up/kernel", "down/kernel"},
        "adam": {"embed/embedding", "norm/scale", "norm/bias", "up/bias", "down/bias"}
        | {"head/kernel", "head/bias"},
    },
    "flax_linen": {
        "muon": {"Dense_0/kernel", "Dense_1/kernel"}
        | {f"MultiHeadDotProductAttention_0/{k}/kernel" for k in ("query", "key", "value", "out")},
        "adam": {"Embed_0/embedding", "pos_embed", "head/kernel", "head/bias"}
        | {"LayerNorm_{0..1}/scale", "LayerNorm_{0..1}/bias", "Dense_0/bias", "Dense_1/bias"}
        | {f"MultiHeadDotProductAttention_0/{k}/bias" for k in ("query", "key", "value", "out")},
    },
    "equinox_mlp": {
        "muon": {"layers/0/weight", "layers/1/weight"},
        "adam": {"layers/{0..1}/bias", "layers/2/weight", "layers/2/bias"},
    },
}


def run_here(name, capsys):
    """What a script prints, in this process."""
    capsys.readouterr()
    with jax.numpy_rank_promotion("allow"):  # JAX's default
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def tables(output):
    """The tables in it: by group, its parameters."""
    found = []
    for table in re.findall(r"^parameter .*\n-+\n(.*?)^muon: ", output, re.M | re.S):
        rows = [(line.split()[0], re.search(" (muon|adam) ", line)) for line in table.splitlines()]
        found.append({g: {name for name, group in rows if group[1] == g} for g in ("muon", "adam")})
    return found


def assert_losses_fall(output, to=0.4):
    """To less than a share of the first one."""
    losses = [float(x) for x in re.findall(r"^step +\d+  loss (\S+)", output, re.M)]
    assert len(losses) >= 3
    assert losses[-1] < to * losses[0], losses


def test_these_are_the_scripts_that_the_readme_names():
    section = re.search(
        r"^## Scripts to copy\n(.*?)^## ", (EXAMPLES / "README.md").read_text(), re.M | re.S
    )
    assert section is not None
    assert set(re.findall(r"^\| `(\w+)\.py`", section[1], re.M)) == GROUPS.keys()


@pytest.mark.parametrize("name", GROUPS)
def test_script_stands_by_itself(name):
    """Short, says how to run it, and imports only public names from outside of `examples`."""
    path = EXAMPLES / f"{name}.py"
    source = path.read_text()
    assert 30 <= len(source.splitlines()) <= 80
    assert f"``python examples/{name}.py`` or ``python -m examples.{name}``" in source
    names = [full.split(".") for full in imported(path)]
    assert "optax_muonplus" in {first for first, *_ in names}
    assert not {first for first, *_ in names} & {"examples", *(x.stem for x in EXAMPLES.iterdir())}
    assert not re.search(r"[\w)]\._[a-z]", source)
    assert not any(part.startswith("_") for full in names for part in full)


@pytest.mark.parametrize("name", GROUPS)
def test_script_trains_and_shows_its_groups(name, capsys):
    output = run_here(name, capsys)
    *before, last = tables(output)
    assert last == GROUPS[name]
    assert_losses_fall(output)
    for table in before:  # Equinox's: by the default rules, which do not guess the last layer
        assert table["muon"] == last["muon"] | {"layers/2/weight"}


# What `docs/howto/rates.md` says of the second rate: leave it out first.
COPIED = [
    *(path for path in EXAMPLES.glob("*.py") if path.stem != "parity"),  # of the paper's code
    *EXAMPLES.glob("hosts/*.py"),
    *(ROOT / "docs" / "howto" / f"{name}.md" for name in ("hosts", "frameworks", "schedules")),
    *(ROOT / "docs" / "start").glob("*.md"),
    ROOT / "README.md",
]


@pytest.mark.parametrize("path", COPIED, ids=lambda path: path.stem)
def test_what_people_copy_leaves_the_second_rate_out(path):
    text = path.read_text()
    assert not re.findall(r"\badam_(?:learning_rate|lr)(?: *=|:) *[^=\s].*\d.*", text)


# The training in one file

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


@pytest.mark.parametrize("devices", [1, 8])
def test_a_batch_in_two_pieces_prints_the_same_losses(config, capsys, devices):
    printed = []
    for k in (1, 2):
        changed = dataclasses.replace(config, accumulate=k, steps=4)
        train_minimal.train(changed, jax.devices()[:devices])
        printed.append(losses(capsys.readouterr().out))
    np.testing.assert_allclose(*printed, atol=2e-4)  # four places are printed


def test_pieces_add_no_products_and_their_sums_lie_as_the_parameters(config):
    """A loop over one piece's gradients, then one update."""
    mesh = train_minimal.make_mesh(jax.devices())
    with jax.set_mesh(mesh):
        graph, params, shardings = train_minimal.make_params(config, mesh)
        tokens = jnp.zeros((2, 4, config.context + 1), jnp.int32)

        def gradients(params, tokens):
            return train_minimal.mean_gradients(params, graph, tokens, shardings)

        compiled = jax.jit(gradients).lower(params, tokens).compile()
        one = jax.jit(jax.grad(lambda p, x: train_minimal.loss_fn(p, graph, x)))
        products = one.lower(params, tokens[0]).compile().as_text().count(" dot(")
    assert compiled.as_text().count(" dot(") == products > 0
    assert jax.tree.map(lambda x: x.spec, compiled.output_shardings[1]) == jax.tree.map(
        lambda x: x.spec, shardings
    )


def test_training_text_and_validation_text_are_apart(config, text):
    training, validation = train_minimal.read_text(config.text)
    assert bytes(training) + bytes(validation) == text.read_bytes()
    assert len(validation) == pytest.approx(0.1 * len(training) / 0.9, abs=2)


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


def test_settings_are_read_by_the_type_of_their_default():
    given = train_minimal.parse(["steps=5", "learning_rate=0.1", "prompt=a=b"])
    assert (given.steps, given.learning_rate, given.prompt) == (5, 0.1, "a=b")
    with pytest.raises(SystemExit, match="rate=1: give name=value, with a name of text, seed"):
        train_minimal.parse(["rate=1"])
    assert train_minimal.parse(["--accumulate=4"]).accumulate == 4
    for wrong in ("0", "3"):
        with pytest.raises(SystemExit, match="give a divisor of batch=8"):
            train_minimal.parse([f"accumulate={wrong}"])


def test_it_is_one_short_file_that_imports_nothing_from_its_folder():
    assert len(FILE.read_text().splitlines()) <= 265
    packages = {name.partition(".")[0] for name in imported(FILE)}
    assert {"jax", "flax", "optax", "numpy", "optax_muonplus"} <= packages
    assert not packages & {"examples", *(path.stem for path in FILE.parent.iterdir())}
