"""Whole optimizers of a rule for matrices, and options of values as keywords."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import optax

from optax_muonplus.frame import (
    ChainTransformation,
    DimensionNumbersTree,
    Link,
    MatrixTransformation,
    Part,
    Rest,
    has_rate,
    named,
)
from optax_muonplus.method import ScaleByShape, check_flag
from optax_muonplus.run import efficiently
from optax_muonplus.transforms._adamw import AdamW
from optax_muonplus.transforms._chains import matrix_chain, partition_with_adamw
from optax_muonplus.transforms._decay import add_decayed_weights, scale_by_learning_rate
from optax_muonplus.transforms._order import parts_of
from optax_muonplus.transforms._rules import check_is_made
from optax_muonplus.trees import LayerAxes, Rules, ShardingTree

T = TypeVar("T")
# Everything between the gradients of matrices and their learning rate.
Rule = Link | MatrixTransformation

# What only a chain sets, by what stands before a function, or the place where it runs.
_SET_BY_CHAINS = {"divisor", "bounded", "stored_transposed", "run"}
_FURTHER = "All other arguments are those of :func:`optax_muonplus.optimizer`."
_OPTIONS = """Options of the values among the arguments may be given by their own names, such as
``beta=0.9`` of the momentum and ``adam_b1=0.9`` of AdamW: they change the value that is given, or
the default."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Default:
    """The default of an option: what the value has, whether that is given or not."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


@overload
def takes_options(function: Callable[..., T], /) -> Callable[..., T]: ...
@overload
def takes_options(*, without: Sequence[str]) -> Callable[[Callable[..., T]], Callable[..., T]]: ...
def takes_options(
    function: Callable[..., Any] | None = None, /, *, without: Sequence[str] = ()
) -> Callable[..., Any]:
    """Makes the options of a function's values keywords of its own.

    A value is an argument whose default is a dataclass, or a chain of them. The decorator serves
    factories of a rule: ``def mine(learning_rate, link=Mine(), **where)`` then takes
    ``mine(0.02, decay=0.9, adam_b1=0.9)``, where ``decay`` is an attribute of ``Mine``, or of a
    momentum in it. In place of ``**where`` stand all further arguments of
    :func:`optax_muonplus.optimizer`, to which the function hands them on. The signature has all of
    these names, and a keyword that is none of them raises TypeError, which says what other
    libraries' names are called here.

    Args:
      function: its keywords must not have the names of options.
      without: arguments of :func:`optax_muonplus.optimizer` that the function does not have.

    Example:
      >>> import dataclasses, optax_muonplus as omp
      >>> @omp.transforms.takes_options
      ... def turned(learning_rate, link=omp.baselines.NorMuon(beta2=0.5), **where):
      ...     return omp.optimizer(link, learning_rate, **where)
      >>> tx = turned(0.02, nu_eps=1e-8, beta=0.9, adam_b1=0.8)
    """
    if function is None:
        return functools.partial(takes_options, without=without)
    arguments = _arguments(function, without)
    offered = {
        x.keyword: inspect.Parameter(
            x.keyword, inspect.Parameter.KEYWORD_ONLY, default=_Default(x.default)
        )
        for parameter in arguments.values()
        for x in _options(parameter.default)
        if x.keyword not in arguments
    }

    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        given = {name: x for name, x in kwargs.items() if name in arguments}
        own = inspect.Signature(list(arguments.values())).bind_partial(*args, **given).arguments
        rest = {name: x for name, x in kwargs.items() if name not in arguments}
        options = {name: x for name, x in rest.items() if not isinstance(x, _Default)}
        values = {name: own.get(name, p.default) for name, p in arguments.items()}
        known = {name: _options(x) for name, x in values.items()}
        _check_options(made.__name__, options, [*arguments, *offered], known)
        for argument, found in known.items():
            if changes := {x.name: options[x.keyword] for x in found if x.keyword in options}:
                own[argument] = _changed(values[argument], changes)
        return function(**own)

    made.__signature__ = inspect.Signature(  # ty: ignore[missing-attribute]
        [*arguments.values(), *offered.values()],
        return_annotation=inspect.signature(function).return_annotation,
    )
    has_rest = len(arguments) > len(inspect.signature(function).parameters)
    text = inspect.cleandoc(function.__doc__ or ""), *([_FURTHER] if has_rest else []), _OPTIONS
    made.__doc__ = "\n\n".join(text)
    return made


def _check_options(
    function: str,
    options: Iterable[str],
    shown: Sequence[str],
    known: Mapping[str, Sequence["_Option"]],
) -> None:
    """Raises TypeError for an option that none of the values has, or more than one."""
    found = [option for each in known.values() for option in each]
    names = dict.fromkeys([*shown, *(x.keyword for x in found)])
    for unknown in (name for name in options if name not in names):
        raise TypeError(f"{function}() got an unexpected keyword argument '{unknown}'")
    for keyword in options:
        owners = [x.owner for x in found if x.keyword == keyword]
        if not owners:
            others = ", ".join(dict.fromkeys(x.owner for x in found))
            raise TypeError(
                f"{function}() has no argument {keyword} with {others}: none of them has it."
            )
        if len(owners) > 1:
            raise TypeError(
                f"{function}() has {keyword} in {' and in '.join(owners)}: give it to one of them,"
                f" as in {owners[0]}({keyword.removeprefix('adam_')}=...)."
            )


class _Option(NamedTuple):
    """An attribute of a value among the arguments, and the keyword that changes it."""

    keyword: str
    name: str
    default: Any
    owner: str  # the class that has the attribute


def _options(value: Any, prefix: str = "") -> list[_Option]:
    """Returns the options of a value, and of those that it is made of."""
    if isinstance(value, MatrixTransformation):
        return [option for part in value.parts for option in _options(part)]
    if hasattr(value, "transformation"):  # its options have names that the rule's have too
        if not isinstance(value, AdamW):
            return []
        prefix = "adam_"
    found, owner = [], type(value).__name__
    for name in _fields(value):
        x = getattr(value, name)
        own = _Option(prefix + name, name, x, owner)
        found += _options(x) if dataclasses.is_dataclass(x) else [own]
    return found


def _arguments(function: Callable[..., Any], without: Sequence[str]) -> dict[str, Any]:
    """Returns the parameters of a function, with those of :func:`optimizer` for its own rest."""
    own = dict(inspect.signature(function).parameters)
    rest = [name for name, p in own.items() if p.kind is p.VAR_KEYWORD]
    if not rest:
        return own
    del own[rest[0]]
    own |= {
        name: p
        for name, p in inspect.signature(optimizer).parameters.items()
        if name not in own and name not in ("rule", *without) and not _is_option(p)
    }
    return dict(sorted(own.items(), key=lambda item: item[1].kind))


def _is_option(parameter: inspect.Parameter) -> bool:
    return isinstance(parameter.default, _Default)


def _fields(value: Any) -> list[str]:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return []
    told = {"norm", "match_frobenius"} if isinstance(value, ScaleByShape) else set()
    names = [field.name for field in dataclasses.fields(value)]
    return [name for name in names if name not in _SET_BY_CHAINS | told]


def _changed(value: Any, options: Mapping[str, Any]) -> Any:
    """Returns a value with other options, wherever in it they are."""
    if not any(x.name in options for x in _options(value)):
        return value
    if isinstance(value, MatrixTransformation):
        return matrix_chain(
            *(_changed(part, options) for part in value.parts),
            weight_dimension_numbers=value.weight_dimension_numbers,
            sharding=value.sharding,
            run=value.run,
        )
    new = {}
    for name in _fields(value):
        x = getattr(value, name)
        if dataclasses.is_dataclass(x):
            new[name] = _changed(x, options)
        elif name in options:
            new[name] = options[name]
    return dataclasses.replace(value, **new)


@takes_options
def optimizer(
    rule: Part,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    *,
    cautious_weight_decay: bool = False,
    adamw: Rest = AdamW(),
    muon_weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
    rules: Rules = (),
    layer_axes: LayerAxes = None,
) -> ChainTransformation:
    r"""A rule for the matrices, with weight decay and learning rate, and AdamW for everything else.

    For each matrix W, the update U of the rule and decay :math:`\lambda`:

    .. math::
      W_t = W_{t-1} - \eta \left( U_t + \lambda W_{t-1} \right)

    A rule whose last link has a ``learning_rate`` of its own, as ``Hyperball`` of
    :mod:`optax_muonplus.baselines` does, gets this one there, and the decay if it has a
    ``weight_decay`` too.

    Args:
      rule: a chain of links, such as ``omp.scale_by_muonplus()`` or ``omp.matrix_chain(...)``, or
        one link, such as ``omp.baselines.NorMuon()`` or an object of your own with ``init(params,
        leaves)`` and ``update(updates, state, params, leaves)``, see
        :class:`optax_muonplus.transforms.Link`.
      learning_rate: number or schedule.
      weight_decay: number or schedule, of the matrices only.
      weight_decay_mask: tree or function of the parameters, as in ``optax.add_decayed_weights``;
        for the matrices.
      cautious_weight_decay: decays only the entries of matrices that the update moves towards zero
        anyway, see :func:`optax_muonplus.transforms.add_decayed_weights`.
      adamw: the options of AdamW, with the learning rate of the matrices unless it has its own; or
        another rule in its place, see ``AdamH`` of :mod:`optax_muonplus.baselines`.
      muon_weight_dimension_numbers: which parameters are matrices, as in
        :func:`optax_muonplus.muonplus`, like the next three.
      sharding: where the parameters lie.
      rules: for parameters that the default rules would read in another way.
      layer_axes: the axes along which layers are stacked.

    Returns:
      A transformation for the whole tree of parameters. Its state is that of ``optax.partition``
      with the labels ``"muon"`` and ``"adam"``.

    Raises:
      TypeError: for a keyword that is no argument and no option; for what is no link.
      ValueError: for a rule that is not called yet, a whole optimizer in its place, a rule that
        ends with ``scale_by_learning_rate``, a decay or mask that a rule with a learning rate of
        its own does not have, and numbers out of range.

    Example:
      >>> import jax.numpy as jnp, optax_muonplus as omp
      >>> signs = omp.matrix_chain(omp.momentum(0.9), omp.orthogonalize(), jnp.sign)
      >>> tx = omp.optimizer(signs, 1e-3, weight_decay=0.1, nesterov=False, adam_b1=0.8)
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> updates, state = tx.update(params, tx.init(params), params)
    """
    check_is_made(rule, "rule")
    check_flag("cautious_weight_decay", cautious_weight_decay)
    decay = weight_decay, weight_decay_mask, cautious_weight_decay
    links = _with_rate(parts_of(rule), learning_rate, *decay)
    run = rule.run if isinstance(rule, MatrixTransformation) else efficiently
    return partition_with_adamw(
        matrix_chain(*links, run=run),
        adamw,
        muon_weight_dimension_numbers,
        sharding,
        rules=rules,
        layer_axes=layer_axes,
    )


def _with_rate(
    parts: Sequence[Any], learning_rate: Any, weight_decay: Any, mask: Any, cautious: bool
) -> Sequence[Any]:
    """Returns the parts of a rule with decay and rate, behind the last one or in it."""
    if not (parts and has_rate(parts[-1]) and dataclasses.is_dataclass(parts[-1])):
        decay = add_decayed_weights(weight_decay, mask, cautious=cautious)
        return *parts, decay, scale_by_learning_rate(learning_rate)
    given = {"learning_rate": learning_rate}
    is_zero = isinstance(weight_decay, int | float) and weight_decay == 0
    if has_decay := hasattr(parts[-1], "weight_decay"):
        given["weight_decay"] = weight_decay
    lacking = {
        "weight_decay": not (has_decay or is_zero) and "weight decay",
        "weight_decay_mask": mask is not None and "mask of its decay",
        "cautious_weight_decay": cautious and "cautious decay",
    }
    for name, words in lacking.items():
        if words:
            raise ValueError(
                f"The rule ends with {named(parts[-1])}, which has a learning rate of its own and"
                f" no {words}. Leave {name} out."
            )
    return *parts[:-1], dataclasses.replace(parts[-1], **given)
