"""One row of `benchmarks.accelerators`: an update, compiled, and what its program says."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

import optax_muonplus as omp
from benchmarks import maxtext, meshes, parity, trees
from benchmarks.compiled import compile_update
from examples.compiled_programs import gpu, hlo, targets, tpu, walk

REFERENCE = "optax.contrib.muon"


class Row(NamedTuple):
    """What is compiled.

    Attributes:
      optimizer: ``"optax"``, ``"maxtext"``, ``"muon"`` or ``"muonplus"``.
      compute_dtype: of the operands of products; None leaves that to the gradients' dtype in Optax
        and MaxText, and to float32 in this package.
      as_optax: whether momentum, shape factor and AdamW are Optax's, so that rows differ only in
        what this package adds; or else its defaults.
    """

    optimizer: str
    compute_dtype: str | None = None
    as_optax: bool = True


ROWS = {
    REFERENCE: Row("optax"),
    "omp.muon:bfloat16": Row("muon", "bfloat16"),
    "omp.muonplus:bfloat16": Row("muonplus", "bfloat16"),
    "omp.muonplus:bfloat16:default": Row("muonplus", "bfloat16", as_optax=False),
    "omp.muonplus:float16": Row("muonplus", "float16"),
    "omp.muonplus:float32": Row("muonplus"),
    maxtext.NAME: Row("maxtext"),
}


def placed(config: Any, target: targets.Target) -> Any:
    """Places shapes on the target's devices, as the options of the command say."""
    axes = meshes.sizes(config.mesh) if config.mesh else {"data": target.devices}
    mesh = Mesh(targets.devices(target).reshape(tuple(axes.values())), tuple(axes))
    tree = meshes.placed(trees.shapes(config.size, dtype=config.dtype), mesh, config.spec)
    return trees.scanned(tree) if config.scanned else tree


def optimizer(
    name: str, tree: Any, maxtext_checkout: Path | None = None, head_size: int | None = None
) -> optax.GradientTransformation:
    """Makes the optimizer of a row; all treat the same parameters as matrices.

    With ``head_size`` this package cuts those of queries, keys and values into heads.
    """
    row = ROWS[name]
    if row.optimizer == "maxtext":
        return maxtext.optimizer(tree, dimension_numbers(tree), maxtext_checkout)
    given: dict[str, Any] = {"muon_weight_dimension_numbers": dimension_numbers(tree)}
    if row.optimizer == "optax":
        return optax.contrib.muon(0.02, **given)
    if head_size is not None:
        layer_axes = trees.LAYER_AXES if "blocks" in tree else None
        given["muon_weight_dimension_numbers"] = omp.per_head(head_size, layer_axes=layer_axes)
    given["compute_dtype"] = row.compute_dtype
    given |= parity.AS_OPTAX if row.as_optax else {}
    sharding = jax.tree.map(lambda x: x.sharding, tree)
    if next(iter(jax.tree.leaves(sharding))).mesh.size > 1:
        given["sharding"] = sharding
    return {"muon": omp.muon, "muonplus": omp.muonplus}[row.optimizer](0.02, **given)


def dimension_numbers(tree: Any) -> Any:
    """Says that kernels are (in, out), or (layers, in, out) where layers are scanned."""
    if "blocks" not in tree:
        return omp.muon_dimension_numbers(tree)
    matrix = omp.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    return jax.tree.map(lambda x: matrix if len(x.shape) == 3 else None, tree)


def figures(
    name: str, tree: Any, target: targets.Target, maxtext_checkout: Path | None, heads: int | None
) -> dict[str, Any]:
    """Compiles the update of one row for ``target`` and reads its program."""
    tx = optimizer(name, tree, maxtext_checkout, heads)
    compiled = compile_update(tx, tree, options=target.compiler_options)
    program = hlo.read_program(compiled.program)
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
