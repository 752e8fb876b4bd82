"""Models of transformers in PyTorch and those of the trainer have the same logits, both ways."""

import dataclasses

import jax
import numpy as np
import pytest

from examples.trainer.settings.hugging_face import to_hugging_face
from examples.trainer.settings.presets import PRESETS
from tests.support.hugging_face import GPT, LLAMA, NETWORKS, TOKENS, V, logits, params_of
from tests.support.hugging_face import read as read_folder
from tests.support.hugging_face import write as write_folder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_numpy = pytest.importorskip("safetensors.numpy")

FORMS = {
    "list": {},
    "stacked": {"scan": True},
    "other projections": {"scan": True, "qkv": None},
}


def torch_logits(model):
    with torch.no_grad():
        found = model.eval()(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    return found[..., :V]  # of the tokens of the tokenizer


def torch_model(config):
    """A random model of transformers, by its own configuration classes."""
    torch.manual_seed(0)
    both = {
        "vocab_size": config.vocab_size or V,
        "tie_word_embeddings": config.tied,
        "initializer_range": 0.2,
    }
    if config.family == "gpt":
        made = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=config.n_layer,
                n_head=config.n_head,
                n_embd=config.d_model,
                n_inner=config.d_ff,
                n_positions=config.context,
                layer_norm_epsilon=config.norm_epsilon,
                **both,
            )
        )
    else:
        made = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                num_hidden_layers=config.n_layer,
                num_attention_heads=config.n_head,
                num_key_value_heads=config.n_kv_head,
                hidden_size=config.d_model,
                intermediate_size=config.d_ff,
                max_position_embeddings=config.context,
                rms_norm_eps=config.norm_epsilon,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
                **both,
            )
        )
    with torch.no_grad():  # norms and biases too are not what they begin as
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def arrays(folder):
    """All arrays of a folder, whatever files they are in."""
    found = [safetensors_numpy.load_file(path) for path in folder.glob("*.safetensors")]
    return {name: x for file in found for name, x in file.items()}


def changed(config, form):
    change = dict(FORMS[form])
    if "qkv" in change:
        if config.n_kv_head:
            pytest.skip("grouped queries have separate projections")
        change["qkv"] = "separate" if config.family == "gpt" else "fused"
    return change


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_of_transformers_is_read(tmp_path, name, form):
    wanted = NETWORKS[name]
    theirs = torch_model(wanted)
    theirs.save_pretrained(tmp_path / "in", max_shard_size="8KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1
    config, params = read_folder(tmp_path / "in", **changed(wanted, form))
    expected = torch_logits(theirs)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits(config, params), expected, atol=1e-4)
    write_folder(tmp_path / "out", config, params)
    before, after = arrays(tmp_path / "in"), arrays(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, x in before.items():
        np.testing.assert_array_equal(after[key], x, err_msg=key, strict=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NETWORKS)
def test_transformers_reads_an_export(tmp_path, name, form):
    config = dataclasses.replace(NETWORKS[name], **changed(NETWORKS[name], form))
    params = params_of(config)
    write_folder(tmp_path / "out", config, params, shard_bytes=4000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    np.testing.assert_allclose(torch_logits(theirs), logits(config, params), atol=1e-4)
    _, read = read_folder(tmp_path / "out", scan=config.scan, qkv=config.qkv)
    assert jax.tree.structure(read) == jax.tree.structure(params)
    for x, y in zip(jax.tree.leaves(read), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


def test_gpt2_small_is_the_default_configuration_of_transformers():
    model = PRESETS["gpt2-small"][1].model
    ours, theirs = to_hugging_face(model, 50_257, "float32", 50_256), transformers.GPT2Config()
    names = ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "layer_norm_epsilon")
    for name in (*names, "activation_function", "tie_word_embeddings"):
        assert ours[name] == getattr(theirs, name), name


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_bfloat16(tmp_path, config):
    half = dataclasses.replace(config, param_dtype="bfloat16")
    params = params_of(half)
    write_folder(tmp_path, half, params, "bfloat16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == torch.bfloat16
    expected = torch_logits(theirs.float())
    _, read = read_folder(tmp_path)
    np.testing.assert_allclose(logits(config, read), expected, atol=1e-4)
    _, read = read_folder(tmp_path, param_dtype="bfloat16")
    for x, y in zip(jax.tree.leaves(read), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


def test_the_tokenizer_begins_texts_as_in_training(tmp_path):
    write_folder(tmp_path, GPT, params_of(GPT))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("ab").input_ids
    assert ids[0] == tokenizer.bos_token_id == tokenizer.eos_token_id == 0 and len(ids) == 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    assert tokenizer.model_max_length == GPT.context
    generation = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert generation.eos_token_id == generation.pad_token_id == 0 and generation.do_sample


def test_a_file_of_the_network_without_its_head_and_with_masks(tmp_path):
    theirs = torch_model(GPT)
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    found = safetensors_numpy.load_file(path)
    bare = {name.removeprefix("transformer."): x for name, x in found.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 12, 12), np.uint8)
    safetensors_numpy.save_file(bare, path, metadata={"format": "pt"})
    config, params = read_folder(tmp_path)
    np.testing.assert_allclose(logits(config, params), torch_logits(theirs), atol=1e-4)
    shorter, params = read_folder(tmp_path, context=5)
    assert params["wpe"]["embedding"].shape == (5, 16) and shorter.context == 5
