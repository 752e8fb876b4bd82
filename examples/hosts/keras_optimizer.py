"""Any Optax transformation as an optimizer of Keras 3 on JAX: a file to copy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax


@keras.saving.register_keras_serializable(package="optax_muonplus")
class OptaxOptimizer(keras.optimizers.Optimizer):
    """An optimizer for ``model.compile``, of any Optax transformation.

    ``optimizer.learning_rate`` is Keras' own, so that its callbacks and schedules work: in each
    step ``transformation`` is called with the rate of that step. Its parameters are a dict from
    ``variable.path``, such as ``"attention/query/kernel"``, to arrays. This shows what each gets::

        omp.describe({v.path: v.value for v in model.trainable_variables})

    The state is kept in variables of Keras: ``model.save_weights`` has it, and a momentum is laid
    out over devices as its parameter is. Functions are not saved, so ``keras.saving.load_model``
    needs ``compile=False``: compile again, and load the weights to keep the state. Variables
    without a gradient in a step are left as they are; their momentum decays.

    Args:
      transformation: a function of the learning rate, such as ``omp.muonplus`` or
        ``lambda rate: omp.muonplus(rate, rules=[...])``.
      learning_rate: a float, or a schedule of ``keras.optimizers.schedules``.
      **options: arguments of ``keras.optimizers.Optimizer``: ``global_clipnorm``, ``use_ema``,
        ``gradient_accumulation_steps``, ``loss_scale_factor``, ``weight_decay``, ``name``. A decay
        given here reaches all variables, and one of the transformation those that it names.

    Raises:
      ValueError: when it is built, if two variables have the same path.
    """

    def __init__(
        self,
        transformation: Callable[[Any], optax.GradientTransformation],
        learning_rate: Any,
        **options: Any,
    ):
        super().__init__(learning_rate=learning_rate, **options)
        self._transformation = transformation

    def build(self, variables: list[Any]) -> None:
        """Makes a variable of each array of the state."""
        if self.built:
            return
        super().build(variables)
        sources = self._updated()
        params = {path: variable.value for path, variable in sources.items()}
        state = self._transformation(1e-3).init(params)  # a decay may be divided by the rate
        leaves, self._treedef = jax.tree_util.tree_flatten_with_path(state)
        self._state = [self._state_variable(path, leaf, sources) for path, leaf in leaves]

    def _updated(self) -> dict[str, Any]:
        """Returns the variables that get updates, by path; a float8 scale becomes its gradient.

        They are not kept: Keras would take them for the optimizer's own, and donate them twice.
        """
        found: dict[str, Any] = {}
        for variable in self._trainable_variables:
            if variable.path in found:
                raise ValueError(f"Give the layers of {variable.path!r} names of their own")
            if not getattr(variable, "overwrite_with_gradient", False):
                found[variable.path] = variable
        return found

    def _state_variable(self, path: Any, leaf: Any, sources: dict[str, Any]) -> Any:
        """Makes a variable that is laid out as the parameter that it belongs to, if any."""
        source = sources.get(getattr(path[-1], "key", "")) if path else None
        alike = source is not None and tuple(source.shape) == np.shape(leaf)
        return self.add_variable(
            shape=np.shape(leaf),
            initializer=lambda shape, dtype=None: leaf,
            dtype=str(leaf.dtype),
            layout=getattr(source, "_layout", None) if alike else None,
            name=jax.tree_util.keystr(path, simple=True, separator="_").replace("/", "_"),
        )

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        rate = jnp.asarray(learning_rate)  # a variable of Keras, unless it is a schedule's
        params = {path: variable.value for path, variable in self._updated().items()}
        found = {v.path: g for v, g in zip(trainable_variables, grads, strict=True)}
        gradients = {
            path: found[path] if path in found else jnp.zeros_like(value)
            for path, value in params.items()
        }
        state = jax.tree.unflatten(self._treedef, [v.value for v in self._state])
        updates, state = self._transformation(rate).update(gradients, state, params)
        for variable, leaf in zip(self._state, jax.tree.leaves(state), strict=True):
            self.assign(variable, leaf)
        new: Any = optax.apply_updates(params, updates)
        for variable in trainable_variables:
            self.assign(variable, new[variable.path])

    @classmethod
    def from_config(cls, config: Any) -> Any:
        """Raises ValueError, because the function is not in the configuration."""
        raise ValueError(
            "An Optax transformation is not saved with a model: load it with compile=False, compile"
            " it with OptaxOptimizer(...), and call model.load_weights to have its state too."
        )
