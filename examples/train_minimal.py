"""Trains a GPT with Muon+ on a mesh, from text to sample, in this one file.

Flax NNX has the layers, ``jax.jit`` compiles a step, and the mesh has two axes: rows of a batch are
cut along "data", matrices along "data" and "model". It reads bytes, so it needs no tokenizer. By
default it learns the source of Python's standard library, in some 3 minutes on two CPU cores.

    python examples/train_minimal.py
    python examples/train_minimal.py text=book.txt steps=1000 batch=64 accumulate=8
    JAX_NUM_CPU_DEVICES=8 python examples/train_minimal.py  # simulated

Shapes: B rows of a batch, T bytes of a row, D width, H heads, K = D / H, V = 256 bytes.
"""

import dataclasses
import functools
import math
import pathlib
import sys
import sysconfig
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muonplus as omp

VOCABULARY = 256
# How the mesh cuts the parameters of a layer. A kernel is (in, out). Norms are not cut.
SPECS = {
    **dict.fromkeys(("query", "key", "value", "up", "head"), P("data", "model")),
    **dict.fromkeys(("out", "down"), P("model", "data")),
    "embed": P(None, "model"),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings; ``name=value`` on the command line changes one."""

    text: str = ""  # a file; "" means the source of Python's standard library
    seed: int = 0
    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 128
    steps: int = 800
    batch: int = 8
    accumulate: int = 1  # pieces of a batch, one after another, before one update
    learning_rate: float = 0.02  # peak, of the matrices under Muon+ and of all else under NAdamW
    weight_decay: float = 0.1  # matrices only
    hold: float = 0.4  # share of the steps at the peak; then the rate falls to zero
    clip: float = 1.0
    log_every: int = 50
    eval_batches: int = 32
    prompt: str = "def "
    sample_bytes: int = 600
    temperature: float = 0.8


class Block(nnx.Module):
    """Causal attention, then an MLP, each on a normalized copy and added back."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        d, self.heads = config.width, config.heads
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)  # kernels are (in, out)
        from_zero = functools.partial(linear, kernel_init=nnx.initializers.zeros)
        self.attention_norm, self.mlp_norm = nnx.RMSNorm(d, rngs=rngs), nnx.RMSNorm(d, rngs=rngs)
        self.query, self.key, self.value = (linear(d, d) for _ in range(3))
        self.out = from_zero(d, d)  # a block begins as the identity
        self.up, self.down = linear(d, 4 * d), from_zero(4 * d, d)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (B, T, D) to the same shape."""
        y = self.attention_norm(x)
        q, k, v = (
            layer(y).reshape(*y.shape[:2], self.heads, -1)  # (B, T, H, K)
            for layer in (self.query, self.key, self.value)
        )
        mixed = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


def rotate(x: jax.Array) -> jax.Array:
    """Turns pairs of the features of (B, T, H, K) by angles that grow with the position (RoPE)."""
    _, t, _, k = x.shape
    rates = 10_000.0 ** -jnp.linspace(0, 1, k // 2, endpoint=False)
    angles = (jnp.arange(t)[:, None] * rates[None])[None, :, None]  # (1, T, 1, K / 2)
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class GPT(nnx.Module):
    """Bytes (B, T) to logits of the next bytes (B, T, V)."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Applies the layers; activations stay cut by rows."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = jax.lax.with_sharding_constraint(block(x), P("data"))
        return self.head(self.norm(x))


def read_text(path: str) -> list[np.ndarray]:
    """Returns the bytes for training, and the last tenth for validation."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = [pathlib.Path(path)] if path else sorted(root.glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    return np.split(text, [len(text) * 9 // 10])


def windows(text: np.ndarray, config: Config, step: int) -> np.ndarray:
    """Returns (B, T + 1) bytes from random places, the same ones for the same step."""
    rng = np.random.default_rng((config.seed, step))
    starts = rng.integers(len(text) - config.context, size=(config.batch, 1))
    return text[starts + np.arange(config.context + 1)].astype(np.int32)


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """Puts two devices along "model" if their number is even, and the rest along "data"."""
    model = 2 if len(devices) % 2 == 0 else 1
    shape, kinds = (len(devices) // model, model), (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh(shape, ("data", "model"), kinds, devices=devices)


def make_params(config: Config, mesh: Mesh):
    """Returns the graph of the model, its parameters, and their shardings."""

    def init():
        return nnx.to_pure_dict(nnx.state(GPT(config, nnx.Rngs(config.seed)), nnx.Param))

    graph, _ = nnx.split(nnx.eval_shape(lambda: GPT(config, nnx.Rngs(0))))
    shardings = jax.tree.map_with_path(  # the path of blocks/0/query/kernel has "query" before last
        lambda path, _: NamedSharding(mesh, SPECS.get(path[-2].key, P())), jax.eval_shape(init)
    )
    return graph, jax.jit(init, out_shardings=shardings)(), shardings


def make_optimizer(config: Config, shardings) -> optax.GradientTransformation:
    """Clips, then gives Muon+ to the matrices and NAdamW to embeddings, head and norms."""
    begin = int(config.hold * config.steps)
    rate = optax.linear_schedule(config.learning_rate, 0.0, config.steps - begin, begin)
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        omp.muonplus(
            rate,
            weight_decay=config.weight_decay,
            sharding=shardings,  # each matrix moves once to the device that works on it
        ),
    )


@jax.jit(static_argnames="graph")
def loss_fn(params, graph, tokens: jax.Array) -> jax.Array:
    """Returns nats per byte of (B, T + 1) bytes."""
    logits = nnx.merge(graph, params)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def mean_gradients(params, graph, pieces: jax.Array, shardings):
    """Returns the mean loss and its gradients, over pieces (K, B / K, T + 1) of a batch in turn."""

    def add(sums, tokens: jax.Array):
        found = jax.value_and_grad(loss_fn)(params, graph, tokens)
        loss, grads = jax.tree.map(jnp.add, sums, found)
        return (loss, jax.lax.with_sharding_constraint(grads, shardings)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)  # in float32, as the parameters
    sums, _ = jax.lax.scan(add, zeros, pieces)
    return jax.tree.map(lambda x: x / len(pieces), sums)


def train(config: Config, devices: Sequence[jax.Device]) -> None:
    """Trains, evaluates and samples."""
    mesh = make_mesh(devices)
    training, validation = read_text(config.text)
    print(f"{len(training):,} bytes of text, {mesh.shape_tuple}, {devices[0].device_kind}")
    with jax.set_mesh(mesh):
        graph, params, shardings = make_params(config, mesh)
        print(omp.describe(params, sharding=shardings))
        tx = make_optimizer(config, shardings)
        opt_state = jax.jit(tx.init)(params)
        # On Auto axes XLA would otherwise choose where the results of a step lie.
        kept = jax.tree.map(lambda x: x.sharding, (params, opt_state))

        @jax.jit(donate_argnums=(0, 1), out_shardings=(*kept, None))
        def train_step(params, opt_state, pieces: jax.Array):
            loss, grads = mean_gradients(params, graph, pieces, shardings)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        rows, in_turn = (NamedSharding(mesh, P(*axes)) for axes in (("data",), (None, "data")))
        start, counted = time.perf_counter(), 0
        for step in range(1, config.steps + 1):
            pieces = np.split(windows(training, config, step), config.accumulate)
            pieces = jax.device_put(np.stack(pieces), in_turn)
            params, opt_state, loss = train_step(params, opt_state, pieces)
            if step == 1 or step % config.log_every == 0:
                loss = float(loss)  # waits until the step is done
                seconds = time.perf_counter() - start
                rate = (step - counted) * config.batch * config.context / seconds
                print(f"step {step:5d}  loss {loss:.4f}  {rate:,.0f} tokens/s", flush=True)
                start, counted = time.perf_counter(), step

        held_out = (windows(validation, config, i) for i in range(config.eval_batches))
        loss = np.mean([loss_fn(params, graph, jax.device_put(x, rows)) for x in held_out])
        print(f"validation loss {loss:.4f}, {loss / math.log(2):.3f} bits per byte\n")
        print(sample(params, graph, config))


def sample(params, graph, config: Config) -> str:
    """Returns the prompt and what the model draws after it."""
    prompt = np.frombuffer(config.prompt.encode(), np.uint8).astype(np.int32)
    stop = len(prompt) + config.sample_bytes
    text = np.pad(prompt, (0, max(config.sample_bytes, config.context)))
    text = draw(params, graph, config, text, len(prompt), stop)
    return bytes(text[:stop].tolist()).decode(errors="replace")


@jax.jit(static_argnames=("graph", "config"))
def draw(params, graph, config: Config, text: jax.Array, start: int, stop: int) -> jax.Array:
    """Fills the places from ``start`` to ``stop`` of a text, byte by byte, without a cache."""
    model, key = nnx.merge(graph, params), jax.random.key(config.seed)

    def next_byte(i: jax.Array, text: jax.Array) -> jax.Array:
        first = jnp.maximum(i - config.context, 0)
        window = jax.lax.dynamic_slice(text, (first,), (config.context,))
        logits = model(window[None])[0, i - 1 - first]  # attention is causal: it sees no later byte
        byte = jax.random.categorical(jax.random.fold_in(key, i), logits / config.temperature)
        return text.at[i].set(byte)

    return jax.lax.fori_loop(start, stop, next_byte, text)


def parse(arguments: Sequence[str]) -> Config:
    """Reads ``steps=100``, or ``--steps=100``, as a setting, by the type of its default."""
    defaults, changes = dataclasses.asdict(Config()), {}
    for argument in arguments:
        name, _, value = argument.removeprefix("--").partition("=")
        if name not in defaults:
            sys.exit(f"{argument}: give name=value, with a name of {', '.join(defaults)}.")
        changes[name] = type(defaults[name])(value)
    config = Config(**changes)
    if config.accumulate < 1 or config.batch % config.accumulate:
        sys.exit(f"accumulate={config.accumulate}: give a divisor of batch={config.batch}.")
    return config


if __name__ == "__main__":
    train(parse(sys.argv[1:]), jax.devices())
