"""Muon+ and Muon as optimizers for whole models: matrices by Muon, everything else by AdamW."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optax

from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree
from optax_muonplus._parameters.leaves import ADAM, MUON, ResolvedTree
from optax_muonplus._parameters.sharding import ShardingTree
from optax_muonplus.matrices._normalization import Norm
from optax_muonplus.matrices._shape_factor import ShapeScale
from optax_muonplus.polar._newton_schulz import Preconditioning
from optax_muonplus.polar._options import DEFAULT_EPS, Polar, PolarFunction
from optax_muonplus.transforms._apply import MatrixTransformation, for_resolved
from optax_muonplus.transforms._links import scale_by_muonplus

Optimizer = Callable[..., optax.GradientTransformationExtraArgs]


def muonplus(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: str | Sequence[Any] = "jordan",
    ns_steps: Any = 5,
    beta: Any = 0.95,
    eps: Any = DEFAULT_EPS,
    weight_decay: Any = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    norm: Norm = "col_row",
    norm_eps: Any = 1e-8,
    match_frobenius: bool = False,
    shape_scale: ShapeScale = "spectral",
    consistent_rms: Any = None,
    nesterov: bool = False,
    bias_correction: bool = False,
    polar: Polar | PolarFunction = "auto",
    preconditioning: Preconditioning = "frobenius",
    adaptive: bool = False,
    compute_dtype: Any = None,
    adam_b1: Any = 0.9,
    adam_b2: Any = 0.999,
    adam_eps: Any = 1e-8,
    adam_eps_root: Any = 0.0,
    adam_weight_decay: Any = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Muon+: Muon with one normalization step after the orthogonalization.

    For each matrix W of shape (m, n) = (out, in), with gradient G and decay :math:`\lambda`:

    .. math::
      M_t = \beta M_{t-1} + (1 - \beta) G_t, \qquad
      O_t = \mathrm{Norm}(\mathrm{Ortho}(M_t)), \qquad
      W_t = W_{t-1} - \eta \left( \sqrt{m/n}\; O_t + \lambda W_{t-1} \right)

    Parameters that are not matrices (embeddings, heads, norms, biases, vectors) get AdamW.
    ``optax_muonplus.describe(params)`` prints what each will get. The state is one momentum buffer
    for each matrix, and AdamW's two for each other parameter.

    Args:
      learning_rate: number or schedule. Of the order of 0.01; the paper's best lie between 0.005
        and 0.06 (its appendix "Detailed Sweep Experiments").
      ns_coeffs: ``"jordan"``, ``"you"``, ``"polar_express"``, ``"dion"``, ``"turbo"`` (4 rows),
        ``"cans"``, one row of coefficients, or several.
      ns_steps: Newton-Schulz steps; the first rows of a table are used.
      beta: momentum decay, in [0, 1).
      eps: added to the norm that divides the momentum before the iteration, and to nothing else.
      weight_decay: decoupled, multiplied by the learning rate, not by the shape factor.
      weight_decay_mask: tree or function of the parameters, as in ``optax.add_decayed_weights``;
        for the matrices.
      mu_dtype: dtype of the momentum buffer; None means the parameter's.
      norm: ``"none"`` (Muon), ``"col"``, ``"row"``, ``"col_row"`` (columns, then rows) or
        ``"row_col"``. A row holds the weights of one output unit.
      norm_eps: inside the root of the row and column norms.
      match_frobenius: rescales the normalized matrix to the Frobenius norm it had before.
      shape_scale: ``"spectral"`` sqrt(m/n), ``"max"`` sqrt(max(1, m/n)) or ``"none"``.
      consistent_rms: if given, in place of ``shape_scale``, the root mean square of every update;
        0.2 matches AdamW's, so that one learning rate serves both groups.
      nesterov: whether the momentum looks one step ahead; for the matrices.
      bias_correction: see :func:`optax_muonplus.momentum`.
      polar: ``"newton_schulz"``, ``"gram"`` (the same polynomial on the Gram matrix), ``"svd"``, a
        function on ``(*batch, out, in)``, or ``"auto"``: of the first two, what does fewer
        operations for each shape, where products are float32 or better.
      preconditioning: ``"frobenius"``, ``"spectral"``, ``"aol"``, ``"aol_out"`` or
        ``"schatten"``, see :func:`optax_muonplus.polar.newton_schulz`.
      adaptive: multiplies each update by its inner product with the momentum, the dual norm.
      compute_dtype: dtype of the operands of matrix products, for example ``"bfloat16"`` on
        accelerators; sums stay in float32 at least. None means the momentum's, at least float32.
      adam_b1: AdamW's first decay.
      adam_b2: AdamW's second decay.
      adam_eps: AdamW's epsilon.
      adam_eps_root: AdamW's epsilon inside the root.
      adam_weight_decay: AdamW's weight decay.
      adam_learning_rate: number or schedule; None means ``learning_rate``.
      muon_weight_dimension_numbers: which parameters are matrices, and how: a tree or prefix tree
        of ``optax.contrib.MuonDimensionNumbers``, ``MatrixSpec`` and None (AdamW), or a function
        from the parameters to one. None means the default rules,
        :func:`optax_muonplus.muon_dimension_numbers`.
      sharding: where the parameters lie: a tree or prefix tree of ``jax.sharding.NamedSharding`` on
        one mesh (None where it is not known), or a function from the parameters to one. With it
        each matrix is moved once to a device that works on it whole, and once back, and replicas
        divide the work; the state is sharded like the parameters from init on. Not needed where
        the mesh has Explicit axes, since arrays tell there. None on a mesh with Auto axes leaves
        the distribution to the compiler, which moves matrices at every step of the iteration.

    Returns:
      A transformation for the whole parameter tree.

    Raises:
      ValueError: when built, for unknown words, too few coefficient rows and numbers out of range;
        at init, for dimension numbers that do not fit the parameters, leaves of three or more axes
        that no rule knows, and integer parameters. Paths and remedies are in the message.

    Under ``optax.inject_hyperparams`` functions count as schedules, as they do for every optimizer:
    name them, and ``mu_dtype`` and ``compute_dtype`` unless they are strings, in ``static_args``.

    Example:
      >>> import jax.numpy as jnp, optax, optax_muonplus as omp
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> tx = omp.muonplus(0.02)
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)

    Source: Zhang et al., *Muon+: Towards More Effective Muon via One Additional Normalization Step
    for LLM Pre-training*, arXiv:2602.21545.
    """
    return partition_with_adamw(
        [
            scale_by_muonplus(  # momentum, polar factor, row and column norms, shape factor
                ns_coeffs,
                ns_steps,
                beta,
                eps,
                mu_dtype,
                norm=norm,
                norm_eps=norm_eps,
                match_frobenius=match_frobenius,
                shape_scale=shape_scale,
                consistent_rms=consistent_rms,
                nesterov=nesterov,
                bias_correction=bias_correction,
                polar=polar,
                preconditioning=preconditioning,
                adaptive=adaptive,
                compute_dtype=compute_dtype,
            ),
            optax.add_decayed_weights(weight_decay, weight_decay_mask),
            optax.scale_by_learning_rate(learning_rate),
        ],
        AdamWArgs(
            learning_rate if adam_learning_rate is None else adam_learning_rate,
            adam_b1,
            adam_b2,
            adam_eps,
            adam_eps_root,
            adam_weight_decay,
        ),
        muon_weight_dimension_numbers,
        sharding,
    )


class AdamWArgs(NamedTuple):
    """Arguments of ``optax.adamw``."""

    learning_rate: optax.ScalarOrSchedule
    b1: Any
    b2: Any
    eps: Any
    eps_root: Any
    weight_decay: Any


def partition_with_adamw(
    links: Sequence[optax.GradientTransformation],
    adamw: AdamWArgs,
    dimension_numbers: DimensionNumbersTree,
    sharding: ShardingTree,
) -> optax.GradientTransformationExtraArgs:
    """A chain of links for the matrices of a tree, and AdamW for everything else.

    Args:
      links: of the chain. A :class:`MatrixTransformation` is told what each matrix is; its own
        dimension numbers and sharding are not used.
      adamw: AdamW's arguments.
      dimension_numbers: as in :func:`muonplus`.
      sharding: as in :func:`muonplus`.
    """
    others = optax.adamw(**adamw._asdict())

    def make(tree: ResolvedTree) -> optax.GradientTransformation:
        matrices = tree.matrices
        made = [
            link.make(matrices) if isinstance(link, MatrixTransformation) else link
            for link in links
        ]
        chain = optax.chain(*made)
        # Labels as a function: Optax would call a tree of labels that is an Equinox module with
        # __call__.
        return optax.partition({MUON: chain, ADAM: others}, lambda _: tree.labels)

    return for_resolved(make, dimension_numbers, sharding)


def variant(base: Optimizer, **arguments: Any) -> Callable[[Callable[[], None]], Optimizer]:
    """Decorates an empty, documented function: it becomes ``base`` with some arguments fixed.

    Args:
      base: an optimizer.
      **arguments: fixed ones, which the variant does not take; or, as :class:`Default`, those that
        only have another default.
    """
    defaults = {k: v.value for k, v in arguments.items() if isinstance(v, Default)}
    fixed = {k: v for k, v in arguments.items() if k not in defaults}
    parameters = [
        p.replace(default=defaults.get(p.name, p.default))
        for p in inspect.signature(base).parameters.values()
        if p.name not in fixed
    ]
    return _with_signature(parameters, lambda given: base(**fixed, **given))


class Default(NamedTuple):
    """Another default for an argument, see :func:`variant`."""

    value: Any


def optimizer_of(
    scale_by: Callable[..., MatrixTransformation],
) -> Callable[[Callable[[], None]], Optimizer]:
    """Decorates an empty, documented function: it becomes the optimizer with ``scale_by`` in it.

    Its arguments are the learning rate, those of ``scale_by``, weight decay, and those of
    :func:`muonplus` for AdamW, dimension numbers and sharding, in the order that they have there.
    """
    ours = dict(inspect.signature(scale_by).parameters)
    for name in ("weight_dimension_numbers", "sharding"):
        ours.pop(name)
    common = inspect.signature(muonplus).parameters
    mu_dtype = ours.pop("mu_dtype")
    positional = [p for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword = [p for p in ours.values() if p.kind is p.KEYWORD_ONLY]
    decay = [common["weight_decay"], common["weight_decay_mask"]]
    last = list(common)[list(common).index("adam_b1") :]
    parameters = [common["learning_rate"], *positional, *decay, mu_dtype, *keyword]

    def make(given: dict[str, Any]) -> optax.GradientTransformationExtraArgs:
        learning_rate, adam_rate = given["learning_rate"], given["adam_learning_rate"]
        adamw = {name: given[f"adam_{name}"] for name in AdamWArgs._fields[1:]}
        return partition_with_adamw(
            [
                scale_by(mu_dtype=given["mu_dtype"], **{name: given[name] for name in ours}),
                optax.add_decayed_weights(given["weight_decay"], given["weight_decay_mask"]),
                optax.scale_by_learning_rate(learning_rate),
            ],
            AdamWArgs(learning_rate if adam_rate is None else adam_rate, **adamw),
            given["muon_weight_dimension_numbers"],
            given["sharding"],
        )

    return _with_signature([*parameters, *(common[name] for name in last)], make)


def _with_signature(
    parameters: Sequence[inspect.Parameter],
    make: Callable[[dict[str, Any]], optax.GradientTransformationExtraArgs],
) -> Callable[[Callable[[], None]], Optimizer]:
    """Gives a documented function these parameters, and ``make`` of its arguments as its body."""
    signature = inspect.Signature(
        parameters, return_annotation=optax.GradientTransformationExtraArgs
    )

    def decorate(documented: Callable[[], None]) -> Optimizer:
        @functools.wraps(documented)
        def optimizer(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return make(bound.arguments)

        # For help() and optax.inject_hyperparams, which read the arguments and defaults off it.
        optimizer.__signature__ = signature  # ty: ignore[missing-attribute]
        del optimizer.__wrapped__
        return optimizer

    return decorate


@variant(muonplus, norm="none")
def muon() -> None:
    """Muon: :func:`muonplus` with ``norm="none"``, and every other argument the same.

    To get ``optax.contrib.muon``'s update rather than the Muon+ paper's baseline, add
    ``shape_scale="max", nesterov=True, bias_correction=True``.

    Source: Jordan et al., *Muon*, https://kellerjordan.github.io/posts/muon/ (2024).
    """
