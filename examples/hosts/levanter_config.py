"""Muon+ in Levanter's configuration: a file to copy.

After its import Levanter knows ``optimizer: {type: muonplus}``. Copy ``haliax_axes.py`` too.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import haliax
import jax
import jax.core
import optax
from jax.sharding import AxisType
from levanter.optim.config import OptimizerConfig

import optax_muonplus as omp
from examples.hosts import haliax_axes


@OptimizerConfig.register_subclass("muonplus")
@dataclasses.dataclass(frozen=True)
class MuonPlusConfig(OptimizerConfig):
    """Muon+ with Levanter's schedules, gradient clipping and weight-decay mask.

    Arguments of Levanter's own Muon have their names there: the schedule (``warmup``, ``decay``,
    ``lr_schedule``, ``min_lr_ratio``, ...) applies to both rates, and ``weight_decay_modules`` and
    ``default_weight_decay_mask`` choose the parameters that decay in both groups. The others are as
    in ``optax_muonplus.muonplus``. On a mesh a matrix is sharded by the names of its axes, so that
    it is moved once to a device that works on it whole, and once back.

    Attributes:
      learning_rate: peak rate of the matrices, of the order of 0.01.
      adam_lr: peak rate of everything else; None means ``learning_rate``.
      weight_decay: decoupled, of the matrices, multiplied by their rate.
      adam_weight_decay: of everything else, multiplied by its rate; None means ``weight_decay``.
      momentum: decay of the momentum.
      max_grad_norm: all gradients together are clipped to it; None means that they are not.
      backend_steps: Newton-Schulz steps.
      muon_epsilon: added to the norm that divides the momentum before the iteration.
      beta1: AdamW's first decay.
      beta2: AdamW's second decay.
      epsilon: AdamW's epsilon.
      norm: ``"row_col"``, ``"none"`` (Muon) or another word of ``muonplus``.
      compute_dtype: dtype of the matrix products, such as ``bfloat16``; None means the momentum's.
      rules: as in ``muonplus``; in YAML only to AdamW, ``[[pattern, null]]``.
      layer_axes: as there. Haliax's own stacks need none.
    """

    learning_rate: float = 0.02
    adam_lr: float | None = None
    weight_decay: float = 0.0
    adam_weight_decay: float | None = None
    momentum: float = 0.95
    nesterov: bool = True
    max_grad_norm: float | None = 1.0
    backend_steps: int = 5
    muon_epsilon: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    norm: omp.matrices.Norm = "row_col"
    match_frobenius: bool = True
    shape_scale: omp.matrices.ShapeScale = "max"
    compute_dtype: str | None = None
    rules: tuple[Any, ...] = ()
    layer_axes: dict[str, int] | None = None

    def build(self, num_train_steps: int) -> optax.GradientTransformation:
        """Makes the transformation, with its rates in ``state.hyperparams``, which are logged."""
        rest = self.learning_rate if self.adam_lr is None else self.adam_lr
        return optax.inject_hyperparams(self._chain)(
            learning_rate=self.lr_scheduler(num_train_steps),
            adam_lr=self.lr_scheduler(num_train_steps, override_lr=rest),
        )

    def _chain(self, learning_rate: Any, adam_lr: Any) -> optax.GradientTransformation:
        links = [optax.clip_by_global_norm(self.max_grad_norm)] if self.max_grad_norm else []
        others = optax.nadamw(adam_lr, self.beta1, self.beta2, self.epsilon, weight_decay=0.0)
        links.append(
            omp.muonplus(
                learning_rate,
                ns_steps=self.backend_steps,
                beta=self.momentum,
                eps=self.muon_epsilon,
                norm=self.norm,
                match_frobenius=self.match_frobenius,
                shape_scale=self.shape_scale,
                nesterov=self.nesterov,
                compute_dtype=self.compute_dtype,
                others=others,
                sharding=_by_names_of_axes,
                muon_weight_dimension_numbers=self._dimension_numbers,
            )
        )
        adam_decay = self.weight_decay if self.adam_weight_decay is None else self.adam_weight_decay
        # Levanter's mask is a function of a whole model, and its decay a part of the step downhill.
        for group, decay, rate in [
            ("muon", self.weight_decay, learning_rate),
            ("adam", adam_decay, adam_lr),
        ]:
            if decay > 0:
                chosen = self.build_weight_decay_mask()
                mask = functools.partial(_decaying, group, chosen, self._labels)
                links.append(optax.add_decayed_weights(-rate * decay, mask))
        return optax.chain(*links)

    def _labels(self, params: Any) -> Any:
        return omp.Matrices(weight_dimension_numbers=self._dimension_numbers).read(params).labels

    def _dimension_numbers(self, params: Any) -> Any:
        return haliax_axes.dimension_numbers(params, self.rules, self.layer_axes)


def _decaying(
    group: str, chosen: Callable[[Any], Any] | None, labels_of: Callable[[Any], Any], params: Any
) -> Any:
    """Restricts Levanter's mask, if it has one, to one of the groups of parameters."""
    labels = labels_of(params)
    if chosen is None:
        return jax.tree.map(lambda label: label == group, labels)
    return jax.tree.map(
        lambda decays, label: decays and jax.tree.leaves(label) == [group], chosen(params), labels
    )


def _by_names_of_axes(params: Any) -> Any:
    """Returns the shardings of parameters by the names of their axes, as Levanter's trainer does.

    Returns None outside of a trainer, and where arrays carry their sharding: on Explicit axes, and
    outside of ``jax.jit``, such as those of a model that was loaded.
    """
    mapping = haliax.partitioning.current_thread_local_mapping()
    auto = AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types
    traced = all(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params))
    if mapping is None or not auto or not traced:
        return None
    return haliax.partitioning.infer_resource_partitions(params, mapping)
