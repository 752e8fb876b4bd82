"""Documents masked from each other: losses, gradients, memory, meshes, and what generation does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.trainer import models
from examples.trainer.data.tokenizer import end_id
from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.models.attention_kernels import (
    check_attention,
    choose,
    chunked_attention,
    describe,
    largest_logits,
    plain,
    splash,
)
from examples.trainer.models.layers import Layout
from examples.trainer.models.sampling import Sampling, sample_ids
from examples.trainer.settings.model import ModelConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import sharding
from examples.trainer.training.loss import head_loss, token_scores
from examples.trainer.training.step import make_model, make_training_loss, on_targets
from tests.support.trainer import CUBE, losses, on_devices, train

END, WORDS = 3, 50
GPT = ModelConfig(n_layer=2, n_head=2, d_model=16, d_ff=40, context=24, document_token=END)
LLAMA = dataclasses.replace(GPT, family="llama", tied=False, n_kv_head=1)
ONE = sharding.make_mesh("", jax.devices()[:1])


def parameters(config, seed=0):
    return nnx.to_pure_dict(nnx.state(models.build(config, WORDS, nnx.Rngs(seed)), nnx.Param))


def words(size, seed=0):
    """Tokens without the one that begins a document."""
    return np.random.default_rng(seed).integers(4, WORDS, size)


def nats(config, params, ids, mesh=ONE):
    """The nats of each token of rows after the first."""
    ids = np.atleast_2d(ids)
    scores = jax.jit(on_targets(token_scores, config, WORDS, mesh))
    return np.asarray(scores(params, ids[:, :-1], ids[:, 1:]).nats)


CASES = {
    "gpt": dataclasses.replace(GPT, attention="chunked"),
    "gpt-plain": dataclasses.replace(GPT, attention="plain", scan=True),
    "llama": dataclasses.replace(LLAMA, scan=True, remat="attention"),
}


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_a_window_of_two_documents_is_as_both_apart(config):
    params = parameters(config)
    documents = [words(7), [END, *words(9, 1)], [END, *words(6, 2), END]]
    window = np.concatenate(documents)
    # Each alone, up to the first token of the next one; what is added comes after.
    rows = np.full((4, len(window)), END)
    for row, part in zip(rows, [window, *documents], strict=True):
        row[: len(part)] = part
    together, *apart = nats(config, params, rows)
    expected = np.concatenate([apart[0][:7], apart[1][:10], apart[2][:7]])
    np.testing.assert_allclose(together, expected, rtol=1e-5, atol=1e-5)
    if config is CASES["gpt"]:
        unmasked = dataclasses.replace(config, document_token=None)
        assert np.abs(nats(unmasked, params, rows)[0] - together).max() > 1e-4


@pytest.mark.parametrize("base", [GPT, LLAMA], ids=["gpt", "llama"])
def test_gradients_do_not_cross(base):
    config = dataclasses.replace(base, remat="full", tied=False)
    ids = np.array([[*words(8), END, *words(8, 1)]])
    graph, params = nnx.split(models.build(config, WORDS, nnx.Rngs(0)))

    def second(params):
        logits = nnx.merge(graph, params)(jnp.asarray(ids))
        return jax.nn.logsumexp(logits[:, 8:], axis=-1).sum()

    gradient = np.asarray(jax.jit(jax.grad(second))(params)["wte"]["embedding"][...])
    only_first = np.setdiff1d(ids[0, :8], ids[0, 8:])
    assert len(only_first) and not gradient[only_first].any()
    assert np.abs(gradient[ids[0, 8:]]).max(axis=1).all()


def exact(q, k, v, documents):
    """Attention within documents by its definition, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.einsum("bihk,bjhk->bhij", q, k) * q.shape[3] ** -0.5
    seen = np.tri(q.shape[1], dtype=bool) & (documents[:, :, None] == documents[:, None])
    scores = np.where(seen[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhij,bjhk->bihk", weights, v), scores.max((0, 2, 3))


@pytest.mark.parametrize(
    "kernel",
    [
        functools.partial(chunked_attention, block=16),
        functools.partial(splash, interpret=True),
        plain,
    ],
    ids=["chunked", "splash", "plain"],
)
def test_kernels_attend_within_documents(kernel):
    q, k, v, dout = (jax.random.normal(jax.random.key(i), (2, 128, 1, 16)) for i in range(4))
    starts = np.zeros((2, 128), int)
    starts[0, [1, 40, 100]] = starts[1, 64] = 1
    documents = starts.cumsum(axis=1)

    def total(function, *given):
        out = function(*given, jnp.asarray(documents))
        return jnp.sum(out * dout), out

    (_, out), gradients = jax.value_and_grad(
        functools.partial(total, kernel), argnums=(0, 1, 2), has_aux=True
    )(q, k, v)
    np.testing.assert_allclose(out, exact(q, k, v, documents)[0], atol=2e-6)
    expected = jax.grad(lambda *given: total(plain, *given)[0], argnums=(0, 1, 2))(q, k, v)
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6)


def test_largest_logits_are_those_that_are_seen():
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 21, 3, 8)) for i in range(3))
    documents = np.broadcast_to(np.arange(21) // 5, (2, 21))
    found = largest_logits(q, k, jnp.asarray(documents), block=8).max(axis=(0, 1, 3))
    np.testing.assert_allclose(found, exact(q, k, v, documents)[1], rtol=1e-5)


def test_a_mesh_gives_the_losses_and_gradients_of_one_device():
    config = dataclasses.replace(LLAMA, attention="chunked", remat="full", n_kv_head=None)
    params, ids = parameters(config), words((8, 25))
    ids[:, [4, 15]] = END

    def results(mesh):
        loss = make_training_loss(config, WORDS, mesh, measures_logits=True)
        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        return jax.tree.leaves(step(params, ids[:, :-1], ids[:, 1:]))

    pairs = zip(results(sharding.make_mesh(CUBE, jax.devices())), results(ONE), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_no_layer_keeps_a_mask():
    config = ModelConfig(
        n_layer=4, n_head=2, d_model=32, context=1024, scan=True, remat="full", attention="chunked"
    )

    def temporary_bytes(token):
        changed = dataclasses.replace(config, document_token=token)
        loss = on_targets(head_loss, changed, WORDS, ONE)
        shapes = jax.eval_shape(lambda: parameters(changed))
        rows = jax.ShapeDtypeStruct((2, 1024), jnp.int32)
        compiled = jax.jit(jax.grad(loss)).lower(shapes, rows, rows).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(END) - temporary_bytes(None) < 1024**2 / 4


class GPU(Layout):
    """A GPU that is not here."""

    platform = "gpu"
    is_here = False


def test_cudnn_is_refused_and_not_chosen():
    config = dataclasses.replace(GPT, compute_dtype="bfloat16")
    assert choose(config, GPU(), 24).kernel == "chunked"
    assert describe(config, GPU()).startswith("chunked attention within documents (cudnn cannot")
    with pytest.raises(UserError, match=r"cudnn cannot mask documents \(--data.document-mask"):
        check_attention(dataclasses.replace(config, attention="cudnn"), GPU())


def test_generation_begins_anew_with_each_document():
    config, key = dataclasses.replace(GPT, attention="plain"), jax.random.key(1)
    params, model_of = parameters(config), make_model(config, WORDS, ONE)

    def forward(params, tokens, kv_cache, start):
        logits, kv_cache = model_of(params).forward(jnp.asarray(tokens), kv_cache, start)
        return logits.at[..., END].add(3.0), kv_cache  # so that some documents end

    found = [END, *words(4), END, *words(3, 1)]
    drawn = sample_ids(forward, params, found, 15, config, key, Sampling(temperature=1, top_k=9))
    whole = jax.jit(lambda window: forward(params, window, None, 0)[0])
    for i in range(15):
        window = np.zeros((1, config.context), int)
        window[0, : len(found)] = found
        best, tokens = jax.lax.top_k(whole(window)[0, len(found) - 1], 9)
        found.append(int(tokens[jax.random.categorical(jax.random.fold_in(key, i), best)]))
    assert found[9:] == drawn
    assert END in drawn[:-1]


def test_a_run_masks_documents_in_training_evaluation_and_sampling(text, tmp_path, trained_run):
    with on_devices(1):
        assert train(text, tmp_path, "--name", "x", "--data.document-mask") == 0
        model = trained.load(CheckpointRef(tmp_path / "x"))
        assert model.config.model.document_token == end_id(model.tokenizer)
    for kind in ("train_loss", "val_loss"):
        masked, unmasked = losses(tmp_path / "x", kind), losses(trained_run, kind)
        assert masked.keys() == unmasked.keys() and masked != unmasked
