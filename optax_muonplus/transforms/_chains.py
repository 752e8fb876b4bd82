"""Chains of links that read a tree by the rules of this library, and run anywhere."""

from optax_muonplus import frame
from optax_muonplus.frame import (
    ChainTransformation,
    DimensionNumbersTree,
    MatrixTransformation,
    Part,
    Rest,
    Run,
)
from optax_muonplus.run import efficiently
from optax_muonplus.transforms._adamw import AdamW
from optax_muonplus.transforms._order import check_order, parts_of
from optax_muonplus.trees import LayerAxes, Rules, ShardingTree, TreeResolver, reader_of


def matrix_chain(
    *links: Part,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
    rules: Rules = (),
    layer_axes: LayerAxes = None,
    run: Run = efficiently,
) -> MatrixTransformation:
    """One transformation of several links, each of which receives the records of matrices.

    Where ``optax.chain`` would read and write, and on a mesh move, each matrix once for every link,
    this does it once for a momentum and all functions on matrices that follow it.

    Args:
      *links: in order, each one of

        - a link of this library, such as ``omp.momentum()`` or ``omp.orthogonalize()``, or what it
          is made of, such as ``omp.polar.Orthogonalize()``;
        - a function on arrays ``(batch, out, in)``;
        - an object with ``init(params, leaves)`` and ``update(updates, state, params, leaves)``,
          for a link with a state of its own, see
          :class:`optax_muonplus.transforms.Link` and :func:`optax_muonplus.transforms.map_blocks`;
        - any transformation of Optax that needs to know nothing of matrices, such as
          ``optax.trace`` or ``optax.scale_by_learning_rate``.
      weight_dimension_numbers: for all links: tree, prefix tree or function of the updates; None
        means the default rules by path. Every leaf must be a matrix.
      sharding: for all links, as in :func:`optax_muonplus.muonplus`, like the next two.
      rules: in place of dimension numbers.
      layer_axes: with ``rules`` or without.
      run: how functions are applied to the matrices: in batches and on a mesh by a plan, or by
        another function with the same results. :func:`optax_muonplus.transforms.plainly` is the
        reference, in a few lines.

    Returns:
      A transformation with a state for each link; a momentum and the functions that follow it have
      one, and a single link's state is the chain's.

    Raises:
      TypeError: for something else.
      ValueError: for a link with dimension numbers or a sharding of its own, a whole optimizer in
        the place of a link, two momenta, what follows a learning rate, and a polar factor right
        after another one; at init, for leaves that are not matrices.

    Example:
      >>> import jax.numpy as jnp, optax_muonplus as omp
      >>> tx = omp.matrix_chain(omp.momentum(), omp.orthogonalize(), jnp.sign)
      >>> params = {"dense": {"kernel": jnp.ones((4, 8))}}
      >>> updates, state = tx.update(params, tx.init(params))
      >>> updates["dense"]["kernel"].shape
      (4, 8)
    """
    resolve = TreeResolver(reader_of(weight_dimension_numbers, rules, layer_axes), sharding)
    parts = [part for link in links for part in parts_of(link)]
    check_order(parts)
    return frame.matrix_chain(*parts, resolve=resolve, run=run)


def partition_with_adamw(
    chain: MatrixTransformation,
    adamw: Rest | None = None,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
    *,
    rules: Rules = (),
    layer_axes: LayerAxes = None,
) -> ChainTransformation:
    """A chain for the matrices of a tree, and AdamW for everything else.

    Args:
      chain: of :func:`optax_muonplus.matrix_chain`, without dimension numbers and sharding of its
        own.
      adamw: AdamW's arguments, or another rule in its place; None means the default ones.
      weight_dimension_numbers: which parameters are matrices, as in
        :func:`optax_muonplus.muonplus`.
      sharding: as in :func:`optax_muonplus.muonplus`, as are the next two.
      rules: for parameters that the default rules would read in another way.
      layer_axes: the axes along which layers are stacked.

    Returns:
      A transformation for the whole tree. Its state is that of ``optax.partition`` with the labels
      ``"muon"`` and ``"adam"``.

    Raises:
      TypeError: for a chain of ``optax.chain``, which hands on no records of matrices.
      ValueError: for a chain with dimension numbers of its own, and without a learning rate for
        AdamW: neither in ``adamw`` nor in the chain.
    """
    if not isinstance(chain, MatrixTransformation):
        raise TypeError(
            f"The chain for matrices is {type(chain).__name__}, which cannot be told what each"
            " matrix is. Make it with optax_muonplus.matrix_chain(...) in place of optax.chain."
        )
    parts = parts_of(chain)
    resolve = TreeResolver(reader_of(weight_dimension_numbers, rules, layer_axes), sharding)
    return frame.partition(*parts, adamw=adamw or AdamW(), resolve=resolve, run=chain.run)
