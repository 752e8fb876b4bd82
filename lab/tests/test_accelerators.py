"""`lab.benchmarks.accelerators`: targets, rows in own processes, and an H100's compiler."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muonplus as omp
from lab.benchmarks import accelerators, parity, trees
from lab.compiled_programs import targets


@pytest.mark.parametrize(
    ("text", "kind", "devices"),
    [("h100:1", "h100", 1), ("h100:64", "h100", 64), ("v5e:4x4", "v5e", 16), ("v5e:1", "v5e", 1)],
)
def test_targets_are_a_kind_and_a_number_or_layout(text, kind, devices):
    target = targets.parse(text)
    assert (target.kind, target.devices) == (kind, devices)


@pytest.mark.parametrize("text", ["h100", "h100:0", "h100:12", "h100:2x2", "b100:1", "v5e:"])
def test_other_targets_raise(text):
    with pytest.raises(ValueError, match="got"):
        targets.parse(text)


def test_the_environment_of_a_row_has_no_settings_of_other_programs(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "cache")
    environment = targets.environment(targets.parse("v5e:16x16"))
    assert not {"XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"} & environment.keys()
    assert environment["TPU_ACCELERATOR_TYPE"] == "v5litepod-256"


def test_a_row_has_the_update_that_its_name_says():
    place = NamedSharding(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]), P())
    tree = {"up": {"kernel": jax.ShapeDtypeStruct((16, 48), jnp.float32, sharding=place)}}
    params = {"up": {"kernel": jax.random.normal(jax.random.key(0), (16, 48))}}
    for name, expected in {
        "omp.muon": omp.muon(0.02, **parity.AS_OPTAX),
        "omp.muonplus": omp.muonplus(0.02),
        "omp.muonplus:col_row": omp.muonplus(0.02, **{x: omp.PAPER[x] for x in parity.COL_ROW}),
        "optax.contrib.muon": optax.contrib.muon(0.02),
    }.items():
        found, correct = (
            tx.update(params, tx.init(params), params)[0]["up"]["kernel"]
            for tx in (accelerators.optimizer(name, accelerators.Config(), tree), expected)
        )
        assert jnp.array_equal(found, correct), name


def test_rows_that_are_not_known_are_refused_before_compiling():
    with pytest.raises(SystemExit, match=r"no row omp\.soap: optax\.contrib\.muon, omp\.muon"):
        accelerators.main(accelerators.Config(rows=("omp.soap",)))


@pytest.mark.parametrize("option", [{"layers": 2}, {"width": 64}, {"scanned": True}])
def test_models_of_others_are_compiled_as_they_are(option):
    with pytest.raises(SystemExit, match="--model leaves no choice of --width, --layers and"):
        accelerators.main(accelerators.Config(model="resnet-50", **option))


def test_shapes_of_models_are_complete():
    """ResNet-50's number of parameters is the published one."""
    sizes = {"resnet-50": 25_557_032, "vit-s": 22_122_472, "conformer": 32_321_792}
    for name, size in (sizes | {"wmt": 133_521_408}).items():
        tree = trees.shapes_of_model(name)
        assert sum(x.size for x in jax.tree.leaves(tree)) == size
        assert not omp.describe(tree).count("no rule")


@pytest.mark.skipif(
    targets.missing(targets.parse("h100:1")) is not None,
    reason="needs requirements/cuda-compiler.txt",
)
@pytest.mark.parametrize(
    "width, squares, longer",
    [
        (512, 4 * 15, 2),
        (64, 0, 6),  # the squares share a stack: launches take longer than work on zeros
    ],
)
def test_an_update_is_compiled_for_an_h100(width, squares, longer, tmp_path):
    rows = ("optax.contrib.muon", "omp.muonplus")
    for scanned in (False, True):
        config = accelerators.Config(
            layers=2, width=width, scanned=scanned, rows=rows, out=tmp_path / str(scanned)
        )
        accelerators.main(config)
        (file,) = (tmp_path / str(scanned)).iterdir()
        result = json.loads(file.read_text())
        theirs, ours = (result["rows"][name] for name in rows)
        # Per layer 15 n^3 for each of four squares, 45 n^3 for each of two 1:4; two operations.
        assert theirs["operations"] == 2 * 2 * (4 * 15 + 2 * 45) * width**3
        # Gram on 1:4: 3 segments of 2 products with the long side, 5 squares, 3 others.
        assert ours["operations"] == 2 * 2 * (squares + longer * (3 * 8 + 5 + 6)) * width**3
        assert 0 < ours["kernels"] < theirs["kernels"]
        assert 0 < ours["kernels_beside_products"] < ours["kernels"]
        # Neither matrices nor their momentum are transposed.
        assert ours["kernels_by_kind"].get("moves", 0) == 0
        assert ours["temporary_bytes"] > 0 and ours["received_bytes"] == 0
