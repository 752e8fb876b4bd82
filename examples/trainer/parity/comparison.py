"""The table of differences between recorded trainings and their repetitions."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from examples.trainer.models.published_names import Family
from examples.trainer.parity import replay
from examples.trainer.parity.recording import Recording
from examples.trainer.parity.replay import Model
from examples.trainer.parity.settings import Parity, optimizer_for
from examples.trainer.settings.model import hidden_width

COLUMNS = "{:<7} {:<17} {:>18} {:>8} {:>9}"
HEADER = COLUMNS.format("model", "compared", "largest difference", "at step", "allowed")


class Difference(NamedTuple):
    """The largest difference of something."""

    family: Family
    what: str
    size: float
    """Infinite where a number is not finite."""
    step: int | None
    """Counted from 0; None before the first step."""
    allowed: float

    @property
    def is_small(self) -> bool:
        return self.size <= self.allowed

    def __str__(self) -> str:
        step = "" if self.step is None else str(self.step)
        size = f"{self.size:.1e}{'' if self.is_small else ' !'}"
        return COLUMNS.format(self.family, self.what, size, step, f"{self.allowed:.0e}").rstrip()


def compare(
    parity: Parity, recording: Recording, family: Family, model: Model
) -> Iterator[Difference]:
    """The differences of a family, as they become known."""
    of_logits, of_losses = parity.tolerance[0], parity.tolerance[-1]
    recorded = recording.families[family]
    with jax.default_matmul_precision("highest"):  # accelerators round operands otherwise
        logits = replay.logits(model, recording.inputs[0, 0])
        error = finite(np.abs(logits - recorded.logits))
        yield Difference(family, "logits", float(error.max()), None, of_logits)
        for norm, losses in recorded.losses.items():
            own = replay.losses(recording, model, optimizer_for(parity, family, norm))
            with np.errstate(divide="ignore"):  # a recorded loss of zero
                error = finite(np.abs(own - losses) / np.abs(losses))
            step = int(error.argmax())
            yield Difference(family, f"losses, {norm}", float(error[step]), step, of_losses)


def finite(errors: np.ndarray) -> np.ndarray:
    """The errors, where those that are not numbers count as infinite."""
    return np.where(np.isnan(errors), np.inf, errors)


def described(family: Family, model: Model) -> str:
    config = model.config
    return (
        f"{family}: {config.n_layer} layers, {config.n_head} heads, width {config.d_model}, "
        f"{hidden_width(config)} inside an MLP, {model.vocab_size} words"
    )
