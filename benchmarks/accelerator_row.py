"""One row of `benchmarks.accelerators`: an update, compiled, and what its program says."""

import importlib
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import optax
from jax.sharding import Mesh

import optax_muonplus as omp
from benchmarks import meshes, parity, trees
from benchmarks.compiled import Compiled, compile_update
from examples.compiled_programs import gpu, hlo, targets, tpu, walk
from examples.trainer.settings.rules import RULES
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.training import optimizers
from optax_muonplus.matrices import Norm

REFERENCE = "optax.contrib.muon"
MAXTEXT = "maxtext.muon"


class Row(NamedTuple):
    """What is compiled.

    Attributes:
      optimizer: ``"adamw"``, ``"optax"``, ``"maxtext"``, ``"muon"``, ``"muonplus"``, or the name of
        a function of `omp.contrib`.
      compute_dtype: of the operands of products; None leaves that to the gradients' dtype in Optax
        and MaxText, and to float32 in this package.
      as_optax: whether momentum, shape factor and AdamW are Optax's, so that rows differ only in
        what this package adds; or else its defaults.
      ns_coeffs: coefficients of five steps; all but Jordan's are another update than Optax's.
      nesterov: whether the momentum looks one step ahead, as Optax's does.
      norm: of Muon+.
      match_frobenius: of Muon+.
    """

    optimizer: str
    compute_dtype: Literal["bfloat16", "float16"] | None = None
    as_optax: bool = True
    ns_coeffs: str = "jordan"
    nesterov: bool = True
    norm: Norm = "col_row"
    match_frobenius: bool = False


RIVALS = [name for name in RULES if name not in ("adamw", "muon", "muonplus")]
ROWS = {
    REFERENCE: Row("optax"),
    "omp.muon:bfloat16": Row("muon", "bfloat16"),
    "omp.muonplus:bfloat16": Row("muonplus", "bfloat16"),
    "omp.muonplus:bfloat16:default": Row("muonplus", "bfloat16", as_optax=False),
    "omp.muonplus:float16": Row("muonplus", "float16"),
    "omp.muonplus:float32": Row("muonplus"),
    "omp.muon:bfloat16:cubic": Row("muon", "bfloat16", ns_coeffs="cubic"),
    "omp.muonplus:bfloat16:cubic": Row("muonplus", "bfloat16", ns_coeffs="cubic"),
    "omp.muonplus:bfloat16:no-nesterov": Row("muonplus", "bfloat16", nesterov=False),
    MAXTEXT: Row("maxtext"),
    "omp.muonplus:bfloat16:matched": Row("muonplus", "bfloat16", match_frobenius=True),
    "omp.muonplus:bfloat16:long": Row("muonplus", "bfloat16", norm="long"),
    "omp.muonplus:bfloat16:long:matched": Row(
        "muonplus", "bfloat16", norm="long", match_frobenius=True
    ),
    "optax.adamw": Row("adamw"),
    **{f"omp.contrib.{name}:bfloat16": Row(name, "bfloat16", as_optax=False) for name in RIVALS},
}


def placed(config: Any, target: targets.Target) -> Any:
    """Cuts the rows of matrices over all devices of the target (FSDP).

    With ``config.experts``, experts are spread over so many groups of devices, and their rows cut
    within a group; other matrices are cut along rows within a group and along columns over them.
    """
    mesh = Mesh(targets.devices(target).reshape(config.experts, -1), ("expert", "data"))
    shapes = trees.shapes(config.size, dtype=config.dtype)
    tree = meshes.placed(shapes, mesh, "data,expert", "expert")
    tree = trees.scanned(tree) if config.scanned else tree
    return meshes.row_by_row(tree) if config.row_by_row else tree


def optimizer(
    name: str, tree: Any, maxtext_checkout: Path | None = None, head_size: int | None = None
) -> optax.GradientTransformation:
    """Makes the optimizer of a row; all treat the same parameters as matrices.

    With ``head_size`` this package cuts those of queries, keys and values into heads.
    """
    row = ROWS[name]
    if row.optimizer == "maxtext":
        return maxtext(tree, maxtext_checkout)
    if row.optimizer == "adamw":
        return optax.adamw(0.001)
    given: dict[str, Any] = {"muon_weight_dimension_numbers": trees.dimension_numbers(tree)}
    if row.optimizer == "optax":
        return optax.contrib.muon(0.02, **given)
    if head_size is not None:
        layer_axes = trees.LAYER_AXES if "blocks" in tree else None
        given["muon_weight_dimension_numbers"] = omp.per_head(head_size, layer_axes=layer_axes)
    sharding = jax.tree.map(lambda x: x.sharding, tree)
    if next(iter(jax.tree.leaves(sharding))).mesh.size > 1:
        given["sharding"] = sharding
    if row.optimizer in RIVALS:  # the trainer's
        config = OptimizerConfig(name=row.optimizer, compute_dtype=row.compute_dtype or "float32")
        if not RULES[row.optimizer].records_inside:
            numbers = given.pop("muon_weight_dimension_numbers")
            given = {"where": omp.Matrices(dimension_numbers=numbers, **given)}
        return optimizers.choose(config)(0.02, **given)
    given |= {"compute_dtype": row.compute_dtype, "ns_coeffs": row.ns_coeffs}
    given |= {"nesterov": row.nesterov}
    given |= parity.AS_OPTAX if row.as_optax else {}
    if row.optimizer == "muon":
        return omp.muon(0.02, **given)
    return omp.muonplus(0.02, norm=row.norm, match_frobenius=row.match_frobenius, **given)


def maxtext(tree: Any, checkout: Path | None) -> Any:
    """Makes MaxText's Muon, from a checkout of its repository or as it is installed.

    Its update differs from `optax.contrib.muon` where leaves have an axis of layers: with
    `use_all_to_all`, its default, layers are spread over the devices by all-to-all. Leaves of one
    layer stay cut as they are, and every product needs collectives.
    """
    if checkout is not None:
        sys.path.insert(0, str(checkout / "src"))
    try:  # it imports nothing but JAX and Optax
        muon = importlib.import_module("maxtext.optimizers.muon")
    except ModuleNotFoundError as error:
        where = "is not installed" if checkout is None else f"is not in {checkout}/src"
        raise SystemExit(
            f"MaxText {where} ({error}): clone https://github.com/AI-Hypercomputer/maxtext and"
            " pass its folder as --maxtext."
        ) from None

    def with_sharding(numbers: omp.MuonDimensionNumbers | None, leaf: Any) -> Any:
        if numbers is None:
            return None
        return muon.MuonDimensionNumbers(*numbers, sharding=leaf.sharding)

    numbers = jax.tree.map(
        with_sharding,
        trees.dimension_numbers(tree),
        tree,
        is_leaf=lambda x: x is None or isinstance(x, omp.MuonDimensionNumbers),
    )
    return muon.muon(0.02, muon_weight_dimension_numbers=numbers, use_all_to_all=True)


def figures(name: str, config: Any, target: targets.Target) -> dict[str, Any]:
    """Compiles the update of one row for ``target`` and reads its program."""
    tree = placed(config, target)
    tx = optimizer(name, tree, config.maxtext, config.per_head)
    options = target.compiler_options
    compiled = compile_update(tx, tree, options=options, stored_alike=config.row_by_row)
    return of_program(compiled, target)


def of_program(compiled: Compiled, target: targets.Target) -> dict[str, Any]:
    """Reads a compiled update: what the device with the most work does, and memory."""
    program = hlo.read_program(compiled.program, scopes=True)
    if target.is_gpu:
        work = gpu.most_work(program, target.rates)
        found = of_gpu(work)
    else:
        work = tpu.most_work(program)
        found = {
            "estimated_cycles": walk.total(work, "cycles"),
            "estimated_cycles_by_opcode": walk.of_kinds(work, "cycles"),
        }
    return {
        "kernels": walk.total(work, "kernels"),
        **found,
        "collectives": walk.of_kinds(work, "collectives"),
        "received_bytes": walk.of_kinds(work, "received"),
        **compiled.figures(),
    }


def of_gpu(work: walk.Work) -> dict[str, Any]:
    """Reports what only programs for GPUs are read for."""
    size = walk.of_kinds(work, "bytes")
    return {
        "kernels_by_kind": walk.of_kinds(work, "kernels"),
        "bytes_beside_products": walk.total(work, "bytes") - size.get("products", 0),
        "bytes_by_kind": size,
        "operations_of_products": walk.total(work, "operations"),
        "roofline_s": walk.total(work, "seconds"),
        "roofline_s_by_kind": walk.of_kinds(work, "seconds"),
    }
