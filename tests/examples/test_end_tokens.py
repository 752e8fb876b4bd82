"""The token between documents, of a tokenizer's own files, and of the flag."""

import dataclasses

import pytest

from examples.data import main
from examples.trainer.data import hub, tokenizer
from examples.trainer.data.prepare import prepare
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import DamagedFileError, UserError
from tests.support.texts import BEGIN, END, TURN, like_llama_3

FILES = {
    "none": ({}, BEGIN),
    "bos": ({"tokenizer_config": {"bos_token": TURN, "eos_token": END}}, TURN),
    "object": ({"tokenizer_config": {"bos_token": {"content": END, "lstrip": False}}}, END),
    "eos": ({"tokenizer_config": {"bos_token": None, "eos_token": END}}, END),
    "map": ({"special_tokens_map": {"bos_token": TURN}, "config": {"bos_token_id": 257}}, TURN),
    "first": (
        {"tokenizer_config": {"eos_token": END}, "special_tokens_map": {"bos_token": TURN}},
        END,
    ),
    "id": ({"config": {"bos_token_id": 257}}, END),
    "ids": ({"generation_config": {"eos_token_id": [999, 258]}}, TURN),
    "a word": ({"config": {"bos_token_id": 1, "eos_token_id": 2}}, BEGIN),
    "unknown": ({"tokenizer_config": {"bos_token": "<s>"}, "config": {"model_type": "x"}}, BEGIN),
}


@pytest.mark.parametrize(("beside", "expected"), FILES.values(), ids=FILES)
def test_files_beside_a_tokenizer_name_it(tmp_path, beside, expected):
    path = like_llama_3(tmp_path / "model", **beside)
    made = tokenizer.load(path)
    assert tokenizer.end_of(made) == (expected, made.token_to_id(expected))
    assert tokenizer.end_of(tokenizer.load(path, BEGIN))[0] == BEGIN  # what is given wins
    ((_, ids),) = tokenizer.encode(made, [f"a{expected}"])
    assert ids[0] == made.token_to_id(expected) and ids.count(ids[0]) == 1
    made.save(str(tmp_path / "alone.json"))  # as a run keeps it
    again = tokenizer.load(tmp_path / "alone.json")
    assert tokenizer.end_of(again)[0] == expected and again.to_str() == made.to_str()


@pytest.mark.parametrize("listed", tokenizer.ENDS)
def test_a_token_of_the_list_changes_no_tokenizer_and_no_cache(tmp_path, listed):
    """Caches and runs of before know the tokenizer without a word on what begins a text."""
    before = like_llama_3(tmp_path / "before", (listed,), "")
    named = {"tokenizer_config": {"bos_token": listed}}
    after = like_llama_3(tmp_path / "after", (listed,), "", **named)
    assert '"post_processor":null' in tokenizer.load(before).to_str()
    assert tokenizer.load(after).to_str() == tokenizer.load(before).to_str()
    keys = {
        hub.cache_key(DataConfig(tokenizer=name, end_token=end), hub.FINEWEB)
        for name in (str(before), str(after), str(tmp_path / "after"))
        for end in ("", listed)
    }
    assert len(keys) == 1
    other = DataConfig(tokenizer=str(after), end_token="a")
    assert hub.cache_key(other, hub.FINEWEB) not in keys


def test_the_key_of_a_named_tokenizer_has_another_token_only():
    keys = [
        hub.cache_key(DataConfig(tokenizer="llama2", end_token=end), hub.FINEWEB)
        for end in ("", "<s>", "</s>")
    ]
    assert keys[0] == keys[1] != keys[2]


def test_the_text_of_a_run_has_the_token_of_the_flag(text, tmp_path):
    like_llama_3(tmp_path / "model", tokenizer_config={"bos_token": BEGIN})
    config = DataConfig(paths=(str(text),), tokenizer=str(tmp_path / "model"))
    found, other = (
        prepare(dataclasses.replace(config, end_token=end), lambda line: None) for end in ("", END)
    )
    assert [data.train.ids[:1].item() for data in (found, other)] == [256, 257]
    assert found.key != other.key
    assert [(data.train.ids[:] >= 256).sum() for data in (found, other)] == [
        (data.train.ids[:] == first).sum() for data, first in ((found, 256), (other, 257))
    ]


def test_errors(text, tmp_path, capsys):
    path = like_llama_3(tmp_path / "model")
    with pytest.raises(
        UserError, match=r"--data.end-token <x>: .* has <\|begin_of_text\|>, .* its"
    ):
        tokenizer.load(path, "<x>")
    trained = DataConfig(paths=(str(text),), vocab_size=300, end_token=END)
    with pytest.raises(UserError, match=r"end-token .*: the tokens .* were made with <\|endoftext"):
        prepare(trained, lambda line: None)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(20)))
    given = ["prepare", "--out", str(tmp_path / "out"), "--paths", str(rows), "--val-fraction"]
    given += ["0.5", "--tokenizer", str(tmp_path / "model"), "--end-token"]
    assert main([*given, END]) == 0
    read = DataConfig(source="prepared", paths=(str(tmp_path / "out"),))
    assert prepare(read, lambda line: None).train.ids[:1].item() == 257
    with pytest.raises(UserError, match=r"were made with <\|end_of_text\|>: leave the flag out"):
        prepare(dataclasses.replace(read, end_token=BEGIN), lambda line: None)
    assert main([*given, TURN]) == 2
    assert "has another token between documents" in capsys.readouterr().err
    (tmp_path / "model/tokenizer_config.json").write_text("[")
    with pytest.raises(DamagedFileError, match=r"tokenizer_config\.json is no JSON object"):
        tokenizer.load(path)
