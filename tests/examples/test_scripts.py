"""The scripts to copy: each runs, trains, and shows which parameter gets which update."""

import os
import re
import runpy
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from examples import train_minimal
from tests.support.documents import ROOT, imported

EXAMPLES = ROOT / "examples"

# By script, the parameters that its table has in each group.
GROUPS = {
    "quickstart": {
        "muon": {"up/kernel", "mix/kernel"},
        "adam": {"up/bias", "mix/bias", "head/kernel", "head/bias"},
    },
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
    "haiku_mlp": {
        "muon": {"mlp/~/linear_0/w", "mlp/~/linear_1/w"},
        "adam": {"mlp/~/linear_{0..1}/b", "head/w", "head/b"},
    },
    "sharded": {
        "muon": {"layer_{0..3}/up", "layer_{0..3}/down"},
        "adam": {"layer_{0..3}/bias"},
    },
    "moe_and_conv_rules": {
        "muon": {"conv", "attention/qkv", "attention/out", "experts/up", "experts/down"},
        "adam": {"router", "classifier"},
    },
    "schedules_and_inject": {"muon": {"up"}, "adam": {"bias", "head"}},
}


# The devices of a process are chosen once, before anything runs on them.
IN_THIS_PROCESS = [name for name in GROUPS if name != "sharded"]


def run_here(name, capsys):
    """What a script prints, in this process."""
    capsys.readouterr()
    with jax.numpy_rank_promotion("allow"):  # JAX's default
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def run_command(*arguments):
    """What ``python ARGUMENTS`` prints, started in the root with no choice of devices."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    environment["PYTHONPATH"] = str(ROOT)
    # As in pyproject.toml: an entry that another process has not finished writing.
    warnings = ["-W", "error", "-W", "ignore:Error reading persistent compilation cache entry"]
    command = [sys.executable, *warnings, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tables(output):
    """The tables in it: by parameter, its cells under the names of their columns."""
    found = []
    lines = iter(output.splitlines())
    for header in lines:
        if not header.startswith("parameter "):
            continue
        starts = [match.start() for match in re.finditer(r"(?<!\S)\S+(?: \S+)*", header)]
        names = re.split(r" {2,}", header)
        assert set(next(lines)) == {"-"}
        rows = {}
        for line in lines:
            if line.startswith("muon: "):
                break
            ends = [*starts[1:], None]
            cells = [line[a:b].strip() for a, b in zip(starts, ends, strict=True)]
            rows[cells[0]] = dict(zip(names, cells, strict=True))
        found.append(rows)
    return found


def groups(table):
    return {
        group: {path for path, row in table.items() if row["group"] == group}
        for group in ("muon", "adam")
    }


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


def check_equinox(output):
    """The first table is that of the default rules, which do not guess which layer is the last."""
    before, after = tables(output)
    assert groups(before)["muon"] == groups(after)["muon"] | {"layers/2/weight"}


def check_rules(output):
    (table,) = tables(output)
    matrices = {path: row["out x in x batch"] for path, row in table.items()}
    assert matrices["conv"] == "16x9x1"
    assert matrices["experts/up"] == "32x16x4"
    assert matrices["attention/qkv"] == "16x16x3"
    error = output.splitlines()[:2]
    assert error[0] == "Without rules: No rule says how these parameters are matrices:"
    assert error[1].startswith("  conv ")


def check_schedules(output):
    """Rates rise from zero and fall to zero; beta rises; the decay is gone from halfway on."""
    columns = {
        name: [float(x) for x in re.findall(rf" {name} (\S+)", output)]
        for name in ("learning_rate", "adam_learning_rate", "beta", "weight_decay")
    }
    for name, peak in [("learning_rate", 0.02), ("adam_learning_rate", 0.005)]:
        first, second, *rest = columns[name]
        assert (first, second) == (0, peak)
        assert rest == sorted(rest, reverse=True)
        assert rest[-1] < 0.01 * peak
    assert columns["beta"][:6] == [0.85, 0.87, 0.89, 0.91, 0.93, 0.95]
    assert columns["weight_decay"] == [0.1] * 5 + [0.0] * 6


CHECKS = {
    "equinox_mlp": check_equinox,
    "moe_and_conv_rules": check_rules,
    "schedules_and_inject": check_schedules,
}


@pytest.mark.parametrize("name", IN_THIS_PROCESS)
def test_script_trains_and_shows_its_groups(name, capsys):
    output = run_here(name, capsys)
    assert groups(tables(output)[-1]) == GROUPS[name]
    assert_losses_fall(output)
    if name in CHECKS:
        CHECKS[name](output)


def test_sharded_script():
    """As a process of its own, which the others are not."""
    output = run_command("examples/sharded.py")
    auto, explicit = re.split(r"^Explicit axes$", output, flags=re.M)
    assert auto.startswith("\nAuto axes\n")
    for part in (auto, explicit):
        (table,) = tables(part)
        assert groups(table) == GROUPS["sharded"]
        assert table["layer_{0..3}/up"]["sharding"] == "(fsdp, -)"
        assert table["layer_{0..3}/bias"]["sharding"] == "(-)"
        assert "8 matrices shared out among 8 devices" in part
        assert_losses_fall(part)
        # There, back, and the results to the replicas: nothing during the iteration.
        (moves,) = re.findall(r"^collectives of an update: (.*)$", part, re.M)
        assert sorted(moves.split(", ")) == ["all-gather", "all-to-all", "all-to-all"]


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


def test_it_is_one_short_file_that_imports_nothing_from_its_folder():
    assert len(FILE.read_text().splitlines()) <= 250
    packages = {name.partition(".")[0] for name in imported(FILE)}
    assert {"jax", "flax", "optax", "numpy", "optax_muonplus"} <= packages
    assert not packages & {"examples", *(path.stem for path in FILE.parent.iterdir())}
