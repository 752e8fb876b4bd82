"""The model of a run, from its folder alone."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.typing import ArrayLike
from tokenizers import Tokenizer

from examples import runs, sharding, training
from examples.checkpoint import restore_part
from examples.config import RunConfig
from examples.training import Extend
from optax_muonplus.transforms import MomentumState


@dataclass(frozen=True)
class Place:
    """Which model, and where it is computed."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run."""
    step: int | None = None
    """That of a checkpoint; the last one by default."""
    mesh: str = ""
    """How devices are arranged, as data=2,fsdp=4; empty: all of them on fsdp."""


@dataclass(frozen=True)
class Trained:
    """A model with its parameters."""

    config: RunConfig
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    step: int
    params: optax.Params
    extend: Extend

    @functools.cached_property
    def token_losses(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Parameters, inputs and targets to nats, and whether no other token was likelier."""

        def losses(
            params: optax.Params, inputs: ArrayLike, targets: ArrayLike
        ) -> tuple[jax.Array, jax.Array]:
            logits, _ = self.extend(params, inputs, None, 0)
            nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            return nats, jnp.argmax(logits, axis=-1) == targets

        everywhere = sharding.replicated(self.mesh)
        return jax.jit(losses, out_shardings=everywhere)


def load(place: Place) -> Trained:
    """Reads the parameters of a checkpoint, and nothing else of it, onto a mesh."""
    config, _ = runs.reopen(place.run)
    tokenizer = runs.read_tokenizer(place.run)
    mesh = sharding.make_mesh(place.mesh, jax.devices())
    vocab_size = tokenizer.get_vocab_size()
    init = training.make_init_params(config.model, vocab_size)
    shapes = jax.eval_shape(init, 0)
    abstract = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        shapes,
        sharding.of_params(shapes, mesh),
    )
    step, params = restore_part(place.run / "checkpoints", place.step, "params", abstract)
    extend = training.make_extend(config.model, vocab_size, mesh)
    return Trained(config, tokenizer, mesh, step, params, extend)


def load_momenta(place: Place) -> tuple[int, dict[str, jax.Array]]:
    """The step of a checkpoint, and the momentum of each matrix by the path of its parameter."""
    config, _ = runs.reopen(place.run)
    program = training.make_program(
        model=config.model,
        rule=config.optimizer,
        steps=config.steps,
        accumulate=config.accumulate,
        vocab_size=runs.read_tokenizer(place.run).get_vocab_size(),
        mesh=sharding.make_mesh(place.mesh, jax.devices()),
    )
    abstract = program.abstract.opt_state
    step, state = restore_part(place.run / "checkpoints", place.step, "opt_state", abstract)
    (found,) = (x for x in jax.tree.leaves(state, is_leaf=has_momentum) if has_momentum(x))
    return step, by_path(found.mu)


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by names such as blocks/0/attn/query/kernel."""
    named = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in named}


def has_momentum(x: object) -> bool:
    """Whether part of an optimizer's state is the momentum of Muon's kind."""
    return isinstance(x, MomentumState)
