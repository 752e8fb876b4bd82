"""LoRA: adapters of linear layers, added to a model and merged into its kernels.

A layer with the kernel W (in, out) gets A (in, r) and B (r, out), and computes
x W + (alpha / r) x A B. A begins uniform within 1 / sqrt(in), as in PEFT, and B at zero, so that
the model begins as it was. Source: Hu et al., LoRA (arXiv:2106.09685), section 4.1.
"""

import contextlib
import difflib
import math
import re
import signal
import threading
from collections.abc import Generator, Sequence
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from examples.trainer.models.layers import Linear
from examples.trainer.settings.model import LoRAConfig, ModelConfig
from examples.trainer.system.errors import UserError

SECONDS = 5.0  # for what takes less than a thousandth


@contextlib.contextmanager
def limited() -> Generator[None]:
    """Raises `TimeoutError` in what takes too long; the matching of Python looks at signals."""
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def search(pattern: str, names: Sequence[str], flag: str, kind: str) -> list[str]:
    """The names in which the pattern is found; raises `UserError` if there is none."""
    try:
        with limited():
            found = [name for name in names if re.search(pattern, name)]
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"{flag} {pattern}: this is no regular expression: {error}.") from None
    except TimeoutError:
        raise UserError(
            f"{flag} {pattern}: to search this takes for ever: give one without a repetition in a"
            " repetition."
        ) from None
    if not found:
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
        raise UserError(
            f"{flag} {pattern} finds no {kind}: give a regular expression for names such as"
            f" {', '.join(near)}."
        )
    return found


A, B = "lora_a", "lora_b"


def add(model: nnx.Module, config: ModelConfig, rngs: nnx.Rngs) -> None:
    """Gives adapters to the layers of blocks that the settings name; raises if there is none."""
    lora = config.lora
    layers = {
        "/".join(map(str, path)): part
        for path, part in nnx.iter_graph(model)
        if isinstance(part, Linear) and "blocks" in path  # the head is read as a matrix
    }
    for name in search(lora.targets, list(layers), "--lora.targets", "layer"):
        layer, dtype = layers[name], jnp.dtype(config.param_dtype)
        *stack, d_in, d_out = layer.kernel.shape
        limit = 1 / math.sqrt(d_in)
        shape = (*stack, d_in, lora.rank)
        a = jax.random.uniform(rngs.params(), shape, jnp.float32, -limit, limit)
        layer.lora_a = nnx.Param(a.astype(dtype))
        layer.lora_b = nnx.Param(jnp.zeros((*stack, lora.rank, d_out), dtype))
        layer.lora_scale = lora.alpha / lora.rank


def merged(params: Any, lora: LoRAConfig) -> optax.Params:
    """The parameters without adapters, which are in the kernels W + (alpha / r) A B then."""
    if not isinstance(params, dict):
        return params
    rest: dict[Any, Any] = {
        name: merged(part, lora) for name, part in params.items() if name not in (A, B)
    }
    if A in params:
        kernel = rest["kernel"]
        a, b = (params[name].astype(jnp.float32) for name in (A, B))
        product = jnp.matmul(a, b, precision="highest") * (lora.alpha / lora.rank)
        rest["kernel"] = (kernel.astype(jnp.float32) + product).astype(kernel.dtype)
    return rest
