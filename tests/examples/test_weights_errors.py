"""What goes wrong with weights: files, names, shapes, configurations, and folders in the way."""

import dataclasses
import json
import weakref

import numpy as np
import pytest

from examples.trainer.settings import hugging_face
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError
from examples.trainer.weights import export, load
from tests.support.hugging_face import GPT, LLAMA, T, V, params_of, read, write

safetensors_numpy = pytest.importorskip("safetensors.numpy")


ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def gpt(tmp_path):
    write(tmp_path / "gpt", GPT, params_of(GPT))
    return tmp_path / "gpt"


@pytest.fixture
def shards(tmp_path):
    write(tmp_path / "shards", GPT, params_of(GPT), shard_bytes=20_000)
    return tmp_path / "shards"


def change_arrays(folder, **changes):
    found = safetensors_numpy.load_file(folder / ONE)
    for name, x in changes.items():
        full = name.replace("__", ".")
        found.pop(full) if x is None else found.update({full: x})
    safetensors_numpy.save_file(found, folder / ONE)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("content", [b"", b"<!doctype html>" * 99, None])
def test_files_that_are_not_whole(gpt, content):
    path = gpt / ONE
    path.write_bytes(path.read_bytes()[:-9] if content is None else content)
    with pytest.raises(UserError, match=r"gpt/model.safetensors is no whole safetensors file .*do"):
        read(gpt)


def test_files_that_are_missing(gpt, shards):
    (gpt / ONE).rename(gpt / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"has neither .*but pytorch_model.bin: save it with safe_"):
        read(gpt)
    lost = sorted(shards.glob("*.safetensors"))[1]
    kept = lost.rename(shards / "kept")
    with pytest.raises(UserError, match=f"{lost} is not there, which {INDEX} names: download"):
        read(shards)
    kept.rename(lost)
    index = json.loads((shards / INDEX).read_text())
    index["weight_map"]["transformer.more"] = lost.name
    (shards / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"{lost} has no transformer.more, which {INDEX} says"):
        read(shards)
    (shards / INDEX).write_text("{}")
    with pytest.raises(UserError, match=r"index.json does not say where arrays are \(KeyError"):
        read(shards)
    (gpt / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"gpt/config.json is no JSON"):
        read(gpt)
    (gpt / "config.json").write_text('{"config": {}, "data": "x"}')
    with pytest.raises(UserError, match=r"has no model_type.*not that of a run"):
        read(gpt)
    (gpt / "config.json").unlink()
    with pytest.raises(UserError, match=r"gpt has no config.json: give a folder as save_pretrain"):
        read(gpt)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"transformer__ln_f__bias": None}, "gpt: transformer.ln_f.bias is missing: give all"),
        ({"transformer__h__7__ln_1__bias": np.ones(16, np.float32)}, "h.7.ln_1.bias is not in a"),
        (
            {"transformer__wte__weight": np.ones((V - 1, 16), np.float32)},
            r"wte.weight has the shape \(256, 16\), and in a gpt of 2 layers .* \(257, 16\)",
        ),
        (
            {"transformer__h__0__mlp__c_fc__weight": np.ones((24, 16), np.float32)},
            r"c_fc.weight has the shape \(16, 24\), and in .* \(24, 16\)",
        ),
        (
            {"transformer__h__0__mlp__c_proj__weight": np.ones((16, 24), np.float32)},
            r"c_proj.weight has the shape \(24, 16\), and in .* \(16, 24\)",
        ),
        (
            {"lm_head__weight": np.ones((V, 16), np.float32)},
            "lm_head.weight differs from transformer.wte.weight",
        ),
        (
            {"transformer__ln_f__bias": np.ones(16, np.int8)},
            "ln_f.bias has the type I8, .* not quantized",
        ),
    ],
)
def test_arrays_that_do_not_fit(gpt, changes, words):
    change_arrays(gpt, **changes)
    with pytest.raises(UserError, match=words):
        read(gpt)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (GPT, {"model_type": "qwen2"}, "model_type is 'qwen2', and this trainer has gpt2 and lla"),
        (GPT, {"activation_function": "gelu"}, "activation_function is 'gelu', .* 'gelu_new' only"),
        (GPT, {"n_layer": "2"}, "n_layer is '2', and has to be a whole number above 0"),
        (GPT, {"layer_norm_epsilon": 0}, "layer_norm_epsilon is 0.0, and has to be a number"),
        (LLAMA, {"attention_bias": True}, "attention_bias is True, and .* False only"),
        (
            LLAMA,
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            r"rope_scaling has .* scaled \(linear\)",
        ),
        (
            LLAMA,
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 9.0}}},
            "positions of their own for each kind of layer, as full_attention",
        ),
        (LLAMA, {"rope_parameters": {"rope_type": "llama3"}}, r"rope_parameters has .*llama3"),
        (LLAMA, {"head_dim": 8}, "head_dim is 8, .* = 4 numbers"),
    ],
)
def test_configurations_that_are_not_computed(tmp_path, config, changes, words):
    write(tmp_path / "x", config, params_of(config))
    change_config(tmp_path / "x", **changes)
    with pytest.raises(UserError, match=f"x/config.json: .*{words}"):
        read(tmp_path / "x")


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (256, "--model.vocab-size is 256, and the tokenizer of the run has 257 tokens: give at"),
        (300, r"wte.weight has the shape \(257, 16\), and in a gpt of 2 layers .* \(300, 16\)"),
    ],
)
def test_a_vocabulary_that_does_not_fit(gpt, size, words):
    change_config(gpt, vocab_size=size)
    with pytest.raises(UserError, match=words):
        read(gpt)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_head": 4}, "--model.n-head is 4, and .* has n_head = 2: leave that flag out"),
        (
            {"norm_epsilon": 1e-6},
            "--model.norm-epsilon is 1e-06, and .* layer_norm_eps",
        ),
        ({"final_norm": "rms"}, "--model.final-norm is rms, and the weights of .* are for layer"),
        ({"mlp": "swiglu"}, "--model.mlp is swiglu"),
        ({"context": T + 1}, "--model.context is 13, and .* has n_positions = 12"),
        ({"tied": False}, "--model.tied is False"),
        ({"vocab_size": 300}, "--model.vocab-size is 300, and .* has vocab_size = 257"),
    ],
)
def test_flags_that_contradict_the_weights(gpt, change, words):
    with pytest.raises(UserError, match=words):
        load.check_weights(str(gpt), dataclasses.replace(GPT, **change), V)


def test_settings_follow_the_folder(gpt, tmp_path):
    begun = hugging_face.beginning_with(str(gpt), RunConfig())
    assert begun.model == dataclasses.replace(GPT, vocab_size=V)
    assert begun.data.tokenizer == str(gpt / "tokenizer.json")
    grouped = dataclasses.replace(LLAMA, n_kv_head=2, rope_base=5.0, vocab_size=320)
    write(tmp_path / "llama", grouped, params_of(grouped))
    assert hugging_face.beginning_with(str(tmp_path / "llama"), RunConfig()).model == grouped


def test_the_hub(gpt, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: asked.append(name) or str(gpt))
    assert hugging_face.find_weights("someone/gpt") == gpt and asked == ["someone/gpt"]

    def offline(name, **_):
        raise OSError("no network.\nlong story")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(UserError, match=r"someone/gpt is no folder here, .*: no network\. Give"):
        hugging_face.find_weights("someone/gpt")
    with pytest.raises(UserError, match=r"--init-from ./x: there is no such folder"):
        hugging_face.find_weights("./x")


def test_networks_that_hugging_face_lacks(tmp_path):
    for change, words in [
        ({"final_norm": "rms"}, "--model.final-norm rms: .* --model.final-norm layer to export"),
        ({"mlp": "swiglu"}, "--model.mlp swiglu: GPT2LMHeadModel of Hugging Face has no such MLP"),
    ]:
        config = dataclasses.replace(GPT, **change)
        with pytest.raises(UserError, match=words):
            write(tmp_path / "x", config, params_of(config))
    config = dataclasses.replace(LLAMA, mlp="gelu")
    with pytest.raises(UserError, match=r"--model.mlp gelu: LlamaForCausalLM"):
        write(tmp_path / "x", config, params_of(config))
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(gpt, shards, tmp_path):
    before = (gpt / ONE).read_bytes()
    with pytest.raises(UserError, match=r"gpt exists and is not empty: .*--overwrite"):
        write(gpt, GPT, params_of(GPT))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is a file"):
        write(tmp_path / "file", GPT, params_of(GPT), overwrite=True)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="run is the folder of a run"):
        write(tmp_path / "run", GPT, params_of(GPT), overwrite=True)
    (shards / "README.md").touch()
    write(shards, GPT, params_of(GPT), overwrite=True)
    names = {path.name for path in shards.iterdir()}
    assert names == {path.name for path in gpt.iterdir()} | {"README.md"}
    assert (shards / ONE).read_bytes() == before


def test_a_write_that_fails_leaves_what_was_there(gpt, monkeypatch):
    before = {path.name: path.read_bytes() for path in gpt.iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_tokenizer", full)
    with pytest.raises(UserError, match=r"cannot write .*gpt: No space left on device. To do: ma"):
        write(gpt, GPT, params_of(GPT), overwrite=True)
    assert {path.name: path.read_bytes() for path in gpt.iterdir()} == before
    assert [path.name for path in gpt.parent.iterdir()] == ["gpt"]


def test_an_export_holds_one_shard(tmp_path, monkeypatch):
    made, held, limit = [], [], 6000
    array_of = export.array_of

    def watched(*given):
        array = np.array(array_of(*given))  # whose memory nothing else holds
        made.append((weakref.ref(array), array.nbytes))
        held.append(sum(size for alive, size in made if alive() is not None))
        return array

    monkeypatch.setattr(export, "array_of", watched)
    write(tmp_path / "x", GPT, params_of(GPT), shard_bytes=limit)
    largest = V * 16 * 4
    assert len(made) == 28 and sum(size for _, size in made) > 5 * limit
    assert sorted(held)[-1] == largest and sorted(held)[-2] <= limit


def test_a_missing_package_is_a_sentence(gpt, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(UserError, match=r"needs the package safetensors .*requirements/hf.txt"):
        read(gpt)
