"""AdamW, for the parameters that are not matrices."""

import dataclasses
from typing import Any

import optax
from jax.typing import ArrayLike

from optax_muonplus.frame import DecayedWeights
from optax_muonplus.method import DECAY, NOT_NEGATIVE, check_flag, check_number
from optax_muonplus.transforms._decay import add_decayed_weights, check_decay, check_rate, real


@dataclasses.dataclass(frozen=True, eq=False)
class AdamW:
    """AdamW's arguments; the chain is that of ``optax.nadamw``, or of ``optax.adamw``.

    Attributes:
      learning_rate: number or schedule; None means that of the matrices.
      b1: first decay.
      b2: second decay.
      eps: epsilon.
      eps_root: epsilon inside the root. It must be positive where updates are differentiated and
        gradients may be zero, as Optax says: the derivative of the root is infinite there.
      nesterov: whether it looks one step ahead (NAdamW), as in ``optax.contrib.muon``; the state of
        both is the same.
      weight_decay: number or schedule; 0 here, where ``optax.adamw`` has 1e-4.
      weight_decay_mask: tree or function of the parameters, as in ``optax.add_decayed_weights``.
      cautious_weight_decay: see :func:`add_decayed_weights`.
    """

    learning_rate: optax.ScalarOrSchedule | None = None
    b1: ArrayLike = 0.9
    b2: ArrayLike = 0.999
    eps: ArrayLike = 1e-8
    eps_root: ArrayLike = 0.0
    nesterov: bool = True
    weight_decay: optax.ScalarOrSchedule = 0.0
    weight_decay_mask: Any = None
    cautious_weight_decay: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError, with the names that optimizers give them, for one out of range."""
        if self.learning_rate is not None:
            check_rate("adam_learning_rate", self.learning_rate)
        check_number("adam_b1", self.b1, DECAY)
        check_number("adam_b2", self.b2, DECAY)
        check_number("adam_eps", self.eps, NOT_NEGATIVE)
        check_number("adam_eps_root", self.eps_root, NOT_NEGATIVE)
        check_flag("adam_nesterov", self.nesterov)
        self.decay()

    def decay(self) -> DecayedWeights:
        """Returns the link that decays weights."""
        mask, cautious = self.weight_decay_mask, self.cautious_weight_decay
        check_flag("adam_cautious_weight_decay", cautious)
        return add_decayed_weights(self.weight_decay, mask, "adam_weight_decay", cautious)

    def transformation(self) -> optax.GradientTransformation:
        """Returns the chain, for a learning rate that is given."""
        check_decay("adam_weight_decay", self.weight_decay, self.learning_rate)
        b1, b2, eps, eps_root = map(real, (self.b1, self.b2, self.eps, self.eps_root))
        return optax.chain(
            optax.scale_by_adam(b1, b2, eps, eps_root, nesterov=self.nesterov),
            self.decay(),
            optax.scale_by_learning_rate(real(self.learning_rate)),
        )
