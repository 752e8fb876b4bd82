"""One row of `benchmarks.accelerators`: an update, compiled, and what its program says."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh

import optax_muonplus as omp
from benchmarks import meshes, parity, trees
from benchmarks.compiled import Compiled, compile_update
from examples.compiled_programs import gpu, hlo, targets, tpu, walk

REFERENCE = "optax.contrib.muon"
WORDS: dict[str, dict[str, Any]] = {
    "bfloat16": {"compute_dtype": "bfloat16"},
    "float16": {"compute_dtype": "float16"},
    "float32": {},  # on a GPU, XLA rounds operands to TF32
    "row_col": {"norm": "row_col"},
    "long": {"norm": "long"},
    "matched": {"match_frobenius": True},
    "cubic": {"ns_coeffs": "cubic"},
    "no-nesterov": {"nesterov": False},
    "default": {},
}
"""Words of a row's name to the arguments that they stand for."""


def arguments(rule: str, words: list[str]) -> dict[str, Any]:
    """Returns the arguments that the words of a row's name stand for.

    Without ``default`` momentum and shape factor are Optax's, and the norm is free ``col_row``.

    Raises:
      ValueError: for a word that is not known.
    """
    if unknown := [word for word in words if word not in WORDS]:
        raise ValueError(f"{unknown[0]} is none of {', '.join(WORDS)}")
    given: dict[str, Any] = {}
    if "default" not in words:
        given = {"nesterov": True, **parity.AS_OPTAX}
        given |= parity.COL_ROW if rule == "omp.muonplus" else {}
    for word in words:
        given |= WORDS[word]
    return given


def optimizer(name: str, tree: Any, head_size: int | None = None) -> optax.GradientTransformation:
    """Makes the optimizer of a row; all treat the same parameters as matrices.

    Args:
      name: such as ``"omp.muonplus:bfloat16:row_col:matched"``.
      tree: shapes of the parameters, with their shardings.
      head_size: outputs of an attention head, into which this package then cuts queries, keys and
        values.

    Raises:
      ValueError: for a name that is not that of a row.
    """
    rule, *words = name.split(":")
    makers = {"omp.muon": omp.muon, "omp.muonplus": omp.muonplus}
    if name not in (REFERENCE, "optax.adamw") and rule not in makers:
        raise ValueError(f"there is no row {name}: {REFERENCE}, optax.adamw, {', '.join(makers)}")
    numbers = trees.dimension_numbers(tree)
    if name == "optax.adamw":
        return optax.adamw(0.001)
    if name == REFERENCE:
        return optax.contrib.muon(0.02, muon_weight_dimension_numbers=numbers)
    given = arguments(rule, words)
    if head_size is not None:
        layer_axes = trees.LAYER_AXES if "blocks" in tree else None
        numbers = omp.per_head(head_size, layer_axes=layer_axes)
    sharding = jax.tree.map(lambda x: x.sharding, tree)
    if next(iter(jax.tree.leaves(sharding))).mesh.size > 1:
        given["sharding"] = sharding
    return makers[rule](0.02, muon_weight_dimension_numbers=numbers, **given)


def placed(config: Any, target: targets.Target) -> Any:
    """Cuts the rows of matrices over all devices of the target (FSDP).

    With ``config.experts``, experts are spread over so many groups of devices, and their rows cut
    within a group; other matrices are cut along rows within a group and along columns over them.
    """
    mesh = Mesh(targets.devices(target).reshape(config.experts, -1), ("expert", "data"))
    shapes = trees.shapes(config.size, config.dtype)
    tree = meshes.placed(shapes, mesh, "data,expert", "expert")
    return trees.scanned(tree) if config.scanned else tree


def figures(name: str, config: Any, target: targets.Target) -> dict[str, Any]:
    """Compiles the update of one row for ``target`` and reads its program."""
    tree = placed(config, target)
    tx = optimizer(name, tree, config.per_head)
    return of_program(compile_update(tx, tree, options=target.compiler_options), target)


def of_program(compiled: Compiled, target: targets.Target) -> dict[str, Any]:
    """Reads a compiled update: what the device with the most work does, and memory."""
    program = hlo.read_program(compiled.program)
    work = gpu.most_work(program, target.rates) if target.is_gpu else tpu.most_work(program)
    return {
        "kernels": walk.total(work, "kernels"),
        **(of_gpu(work) if target.is_gpu else of_tpu(work)),
        "collectives": walk.of_kinds(work, "collectives"),
        "received_bytes": walk.of_kinds(work, "received"),
        **compiled.figures(),
    }


def of_gpu(work: walk.Work) -> dict[str, Any]:
    """Reports what only programs for GPUs are read for."""
    size, kernels = walk.of_kinds(work, "bytes"), walk.of_kinds(work, "kernels")
    return {
        "kernels_by_kind": kernels,
        "kernels_beside_products": walk.total(work, "kernels") - kernels.get("products", 0),
        "bytes_beside_products": walk.total(work, "bytes") - size.get("products", 0),
        "bytes_by_kind": size,
        "operations_of_products": walk.total(work, "operations"),
        "roofline_s": walk.total(work, "seconds"),
        "roofline_s_by_kind": walk.of_kinds(work, "seconds"),
    }


def of_tpu(work: walk.Work) -> dict[str, Any]:
    """Reports what libtpu estimates."""
    return {
        "estimated_cycles": walk.total(work, "cycles"),
        "estimated_cycles_by_opcode": walk.of_kinds(work, "cycles"),
    }
