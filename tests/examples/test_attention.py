"""Kernels of attention: equal to the definition, in less memory, and within documents."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.trainer.data.tokenizer import end_id
from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.models import attention_kernels, language_model
from examples.trainer.models.attention_kernels import (
    check_attention,
    choose,
    chunked_attention,
    describe,
    plain,
    splash,
)
from examples.trainer.models.layers import Layout
from examples.trainer.models.sampling import Sampling, sample_ids
from examples.trainer.settings.model import ModelConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import sharding
from examples.trainer.training.loss import head_loss, token_scores
from examples.trainer.training.step import make_model, on_targets
from tests.support.trainer import CUBE, losses, on_devices, train


def random(shape, dtype="float32", n=4):
    """Queries, keys, values, and a gradient of the result."""
    return [jax.random.normal(jax.random.key(i), shape, dtype) for i in range(n)]


def result_and_gradients(kernel, q, k, v, dout):
    """The result of a kernel, and the gradients of its operands, in float32."""

    @jax.jit
    def compute(q, k, v, dout):
        out, back = jax.vjp(kernel, q, k, v)
        return out, *back(dout)

    return [np.asarray(x, np.float32) for x in compute(q, k, v, dout)]


def exact(q, k, v, dout, documents=None):
    """The same by the definition, in float64; `documents` are numbers (B, T)."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    t, scale = q.shape[1], q.shape[3] ** -0.5
    scores = np.einsum("bihk,bjhk->bhij", q, k) * scale
    seen = np.tri(t, dtype=bool)[None]
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None])
    scores = np.where(seen[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bihk,bjhk->bhij", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    return [
        np.einsum("bhij,bjhk->bihk", p, v),
        np.einsum("bhij,bjhk->bihk", ds, k),
        np.einsum("bhij,bihk->bjhk", ds, q),
        np.einsum("bhij,bihk->bjhk", p, dout),
    ]


# float32: sums of some ten products, and softmaxes that were scaled once for each block.
# bfloat16: weights and results are rounded to 8 bits, of values up to 4.
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 2e-6), ("bfloat16", 4e-2)])
@pytest.mark.parametrize(("t", "block"), [(21, 8), (24, 8), (1, 8), (20, 256)])
def test_chunked_attention_is_exact(t, block, dtype, atol):
    arrays = random((2, t, 3, 8), dtype)
    kernel = functools.partial(chunked_attention, block=block)
    for one, expected in zip(result_and_gradients(kernel, *arrays), exact(*arrays), strict=True):
        np.testing.assert_allclose(one, expected, atol=atol)


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 2e-6), ("bfloat16", 4e-2)])
def test_splash_attention_is_exact(dtype, atol):
    arrays = random((1, 128, 1, 16), dtype)
    kernel = functools.partial(splash, interpret=True)
    for one, expected in zip(result_and_gradients(kernel, *arrays), exact(*arrays), strict=True):
        np.testing.assert_allclose(one, expected, atol=atol)


def test_memory_of_chunked_attention_does_not_grow_with_the_square_of_the_context():
    def temporary_bytes(kernel, t):
        rows = jax.ShapeDtypeStruct((1, t, 2, 16), jnp.float32)
        gradient = jax.grad(lambda q, k, v: kernel(q, k, v).sum(), argnums=(0, 1, 2))
        compiled = jax.jit(gradient).lower(rows, rows, rows).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    blocks = functools.partial(chunked_attention, block=64)
    scores = 2 * 4 * 2048**2  # bytes, for two heads
    assert temporary_bytes(plain, 2048) > scores
    assert temporary_bytes(blocks, 2048) < scores / 10
    assert temporary_bytes(blocks, 4096) < 2.2 * temporary_bytes(blocks, 2048)


def test_heads_that_do_not_divide_are_computed_by_each_device():
    layout = Layout(sharding.make_mesh("data=2,tensor=4", jax.devices()))
    arrays = random((2, 12, 2, 8))

    def divided(q, k, v):
        return layout.divide(chunked_attention, ("batch", None, "heads", None), q, k, v)

    for one, expected in zip(result_and_gradients(divided, *arrays), exact(*arrays), strict=True):
        np.testing.assert_allclose(one, expected, atol=2e-6)


class Accelerator(Layout):
    """A mesh of devices that are not here."""

    platform = "gpu"
    is_here = False


class TPU(Accelerator):
    platform = "tpu"


@pytest.mark.parametrize(
    ("layout", "change", "kernel", "reason"),
    [
        (Layout(), {}, "chunked", ""),
        (Layout(), {"attention": "plain"}, "plain", ""),
        (Layout(), {"attention": "cudnn"}, "chunked", "cudnn is not for a cpu"),
        (Accelerator(), {}, "chunked", "cudnn: cuDNN "),  # not detected, or not found
        (TPU(), {}, "splash", ""),
        (TPU(), {"context": 200}, "chunked", "splash needs rows of a multiple of 128 tokens"),
        (TPU(), {"n_head": 4}, "chunked", "splash needs heads of a multiple of 64 numbers, not 32"),
        (TPU(), {"attention": "cudnn"}, "chunked", "cudnn is not for a tpu"),
    ],
)
def test_choice_of_a_kernel(layout, change, kernel, reason):
    config = ModelConfig(n_head=2, d_model=128, context=256, compute_dtype="bfloat16")
    config = dataclasses.replace(config, **change)
    found = choose(config, layout, config.context)
    assert found.kernel == kernel and found.reason.startswith(reason)
    assert describe(config, layout).startswith(f"{kernel} attention" + (" (" if reason else ""))
    if reason and config.attention != "auto":
        with pytest.raises(UserError, match=f"--model.attention {config.attention} cannot be used"):
            check_attention(config, layout)
    else:
        check_attention(config, layout)


def test_cudnn_that_does_not_compile_is_not_used(monkeypatch):
    def broken(q, k, v):
        raise jax.errors.JaxRuntimeError("INTERNAL: No valid engine configs\nfor this")

    monkeypatch.setattr(attention_kernels, "cudnn", broken)
    config = ModelConfig(context=257)  # asked for nowhere else, since choices are kept
    assert choose(config, Accelerator(), 257).reason == "cudnn: INTERNAL: No valid engine configs"


# Documents that are masked from each other


END, WORDS = 3, 50


MASKED = ModelConfig(n_layer=2, n_head=2, d_model=16, d_ff=40, context=24, document_token=END)


MASKED_LLAMA = dataclasses.replace(MASKED, family="llama", tied=False, n_kv_head=1)


ONE = sharding.make_mesh("", jax.devices()[:1])


def parameters(config, seed=0):
    return nnx.to_pure_dict(
        nnx.state(language_model.build(config, WORDS, nnx.Rngs(seed)), nnx.Param)
    )


def words(size, seed=0):
    """Tokens without the one that begins a document."""
    return np.random.default_rng(seed).integers(4, WORDS, size)


def nats(config, params, ids, mesh=ONE):
    """The nats of each token of rows after the first."""
    ids = np.atleast_2d(ids)
    scores = jax.jit(on_targets(token_scores, config, WORDS, mesh))
    return np.asarray(scores(params, ids[:, :-1], ids[:, 1:]).nats)


CASES = {
    "gpt": dataclasses.replace(MASKED, attention="chunked"),
    "gpt-plain": dataclasses.replace(MASKED, attention="plain", scan=True),
    "llama": dataclasses.replace(MASKED_LLAMA, scan=True, remat="attention"),
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


@pytest.mark.parametrize("base", [MASKED, MASKED_LLAMA], ids=["gpt", "llama"])
def test_gradients_do_not_cross(base):
    config = dataclasses.replace(base, remat="full", tied=False)
    ids = np.array([[*words(8), END, *words(8, 1)]])
    graph, params = nnx.split(language_model.build(config, WORDS, nnx.Rngs(0)))

    def second(params):
        logits = nnx.merge(graph, params)(jnp.asarray(ids))
        return jax.nn.logsumexp(logits[:, 8:], axis=-1).sum()

    gradient = np.asarray(jax.jit(jax.grad(second))(params)["wte"]["embedding"][...])
    only_first = np.setdiff1d(ids[0, :8], ids[0, 8:])
    assert len(only_first) and not gradient[only_first].any()
    assert np.abs(gradient[ids[0, 8:]]).max(axis=1).all()


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
    q, k, v, dout = random((2, 128, 1, 16))
    starts = np.zeros((2, 128), int)
    starts[0, [1, 40, 100]] = starts[1, 64] = 1
    documents = starts.cumsum(axis=1)

    def masked(*given):
        return kernel(*given, jnp.asarray(documents))

    expected = exact(q, k, v, dout, documents)
    for one, other in zip(result_and_gradients(masked, q, k, v, dout), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6)


def test_a_mesh_gives_the_losses_and_gradients_of_one_device():
    config = dataclasses.replace(MASKED_LLAMA, attention="chunked", remat="full", n_kv_head=None)
    params, ids = parameters(config), words((8, 25))
    ids[:, [4, 15]] = END

    def results(mesh):
        loss = on_targets(head_loss, config, WORDS, mesh)
        step = jax.jit(jax.value_and_grad(loss))
        return jax.tree.leaves(step(params, ids[:, :-1], ids[:, 1:]))

    pairs = zip(results(sharding.make_mesh(CUBE, jax.devices())), results(ONE), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.cpu_program
def test_no_layer_keeps_a_mask_of_documents():
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

    assert temporary_bytes(END) - temporary_bytes(None) < 1024**2 / 4  # a quarter of one mask


def test_cudnn_is_refused_for_documents_and_not_chosen():
    config = dataclasses.replace(MASKED, compute_dtype="bfloat16")
    assert choose(config, Accelerator(), 24).kernel == "chunked"
    shown = describe(config, Accelerator())
    assert shown.startswith("chunked attention within documents (cudnn cannot")
    with pytest.raises(UserError, match=r"cudnn cannot mask documents \(--data.document-mask"):
        check_attention(dataclasses.replace(config, attention="cudnn"), Accelerator())


def test_generation_begins_anew_with_each_document():
    config, key = dataclasses.replace(MASKED, attention="plain"), jax.random.key(1)
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
