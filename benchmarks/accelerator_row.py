"""One row of `benchmarks.accelerators`: an update, compiled, and what its program says."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

import optax_muonplus as omp
from benchmarks import maxtext, meshes, parity, trees
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


def placed(
    size: trees.Size, dtype: str, target: targets.Target, mesh: str | None, spec: str, scanned: bool
) -> Any:
    """Shapes of the parameters on the target's devices, with separate layers or scanned ones."""
    axes = {"data": target.devices}
    if mesh is not None:
        axes = {name: int(n) for name, n in (part.split("=") for part in mesh.split(","))}
    devices = targets.devices(target).reshape(tuple(axes.values()))
    tree = meshes.placed(trees.shapes(size, dtype=dtype), Mesh(devices, tuple(axes)), spec)
    return trees.scanned(tree) if scanned else tree


def optimizer(
    name: str, tree: Any, maxtext_checkout: Path | None = None, head_size: int | None = None
) -> optax.GradientTransformation:
    """The optimizer of a row, for the parameters ``tree``; all treat the same ones as matrices.

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
    """Kernels are (in, out), or (layers, in, out) where layers are scanned."""
    if "blocks" not in tree:
        return omp.muon_dimension_numbers(tree)
    matrix = omp.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    return jax.tree.map(lambda x: matrix if len(x.shape) == 3 else None, tree)


def figures(
    name: str,
    tree: Any,
    target: targets.Target,
    maxtext_checkout: Path | None = None,
    head_size: int | None = None,
) -> dict[str, Any]:
    """Compiles the update of one row for ``target`` and reads its program."""
    tx = optimizer(name, tree, maxtext_checkout, head_size)
    state = meshes.placed_state(jax.eval_shape(tx.init, tree), tree)
    begin = time.perf_counter()
    lowered = jax.jit(tx.update).lower(tree, state, tree)
    compiled = lowered.compile(compiler_options=target.compiler_options)
    seconds = time.perf_counter() - begin
    program = hlo.read_program(compiled)
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        **(_gpu(program, target) if target.is_gpu else _tpu(program)),
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "compile_s": seconds,
    }


def _gpu(program: hlo.Program, target: targets.Target) -> dict[str, Any]:
    work = gpu.most_work(program, target.rates)
    kinds = {name: walk.of_kinds(work, name) for name in ("kernels", "bytes", "seconds")}
    return {
        "kernels": walk.total(work, "kernels"),
        "kernels_by_kind": kinds["kernels"],
        "bytes_beside_products": walk.total(work, "bytes") - kinds["bytes"].get("products", 0),
        "bytes_by_kind": kinds["bytes"],
        "operations_of_products": walk.total(work, "operations"),
        "roofline_s": walk.total(work, "seconds"),
        "roofline_s_by_kind": kinds["seconds"],
        **_collectives(work),
    }


def _tpu(program: hlo.Program) -> dict[str, Any]:
    work = tpu.most_work(program)
    return {
        "kernels": walk.total(work, "kernels"),
        "estimated_cycles": walk.total(work, "cycles"),
        "estimated_cycles_by_opcode": walk.of_kinds(work, "cycles"),
        **_collectives(work),
    }


def _collectives(work: walk.Work) -> dict[str, Any]:
    return {
        "collectives": walk.of_kinds(work, "collectives"),
        "received_bytes": walk.of_kinds(work, "received"),
    }
