"""Tokenizers: trained, from a file or the hub; what they lose, and where documents begin."""

import dataclasses

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from examples.trainer.data import tokenizer
from examples.trainer.data.prepare import prepare
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import UserError
from tests.support.trainer import quiet

BEGIN, FINISH = "<|begin_of_text|>", "<|end_of_text|>"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def test_a_trained_tokenizer_is_lossless(tmp_path):
    text = "def f(x):\n\treturn  x\r\n\n  naïve 日本語 🎉 \x00 <|endoftext|> end \n"
    loaded = tokenizer.load(saved(tmp_path, tokenizer.train(["some other text"], 300)))
    [(_, [end, *ids])] = tokenizer.encode(loaded, [text])
    assert loaded.decode(ids, skip_special_tokens=False) == text
    assert end == tokenizer.end_of(loaded)[1] and end not in ids  # END inside a text is only text


def saved(folder, made):
    made.save(str(folder / "own.json"))
    return folder / "own.json"


def of_letters(special=("<s>",), without="", normalizer=None):
    """A token for each byte, as a letter, but for some; a normalizer may change the text before."""
    letters = [x for x in sorted(pre_tokenizers.ByteLevel.alphabet()) if x not in without]
    made = Tokenizer(models.BPE({x: i for i, x in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    if normalizer:
        made.normalizer = normalizer
    return made


def sentence_piece(without=""):
    """LLaMA's form: bytes are tokens, spaces are lines."""
    pieces = [f"<0x{i:02X}>" for i in range(256)]
    words = [x for x in (SPACE, "t", "h", "th") if x != without]
    numbers = {x: i for i, x in enumerate(["<unk>", "<s>", "</s>", *pieces, *words])}
    made = Tokenizer(models.BPE(numbers, [("t", "h")], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    in_bytes = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), *in_bytes])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def unknown_words():
    made = Tokenizer(models.WordLevel({"<s>": 0, "[UNK]": 1, "the": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


LOSSLESS = {
    "letters": of_letters(),
    "a space before": of_letters(normalizer=normalizers.Prepend(" ")),
    "sentence piece": sentence_piece(),
}
LOSSY = {
    "unknown words": unknown_words(),
    "no letter for one byte": of_letters(without="\N{LATIN SMALL LETTER O WITH CIRCUMFLEX}"),  # F4
    "lower case": of_letters(normalizer=normalizers.Lowercase()),
    "gaps": Tokenizer(models.BPE({"</s>": 0, "b": 2}, [])),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_tokenizers_that_keep_the_text_are_taken(tmp_path, name):
    made = tokenizer.load(saved(tmp_path, LOSSLESS[name]))
    [(_, [_, *ids])] = tokenizer.encode(made, ["the end 日本"])
    assert made.decode(ids).strip() == "the end 日本"


@pytest.mark.parametrize("name", LOSSY)
def test_tokenizers_that_lose_text_are_refused(tmp_path, name):
    made = tokenizer.load(saved(tmp_path, LOSSY[name]))
    with pytest.raises(UserError, match=r"loses or changes some text, .* tokens for all bytes"):
        next(tokenizer.encode(made, ["the"]))


@pytest.mark.parametrize(
    ("content", "said"),
    {
        None: r"t\.json is not a tokenizer \(.*: give gpt2, llama2 or a tokenizer\.json",
        "{": r"t\.json is not a tokenizer",
        of_letters(special=()).to_str(): "has no token .*</s>: give .* as --data.end-token",
    }.items(),
)
def test_bad_tokenizers(text, tmp_path, content, said):
    path = tmp_path / "t.json"
    if content:
        path.write_text(content)
    with pytest.raises(UserError, match=said):
        prepare(DataConfig(paths=(str(text),), tokenizer=str(path)), quiet)


@pytest.mark.parametrize("given", [{"lstrip": True}, {"rstrip": True}])
def test_added_tokens_that_swallow_spaces_are_refused(text, given):
    made = of_letters()
    made.add_tokens([AddedToken("<name>")])
    assert list(tokenizer.encode(made, ["a  <name>  b"]))
    made.add_tokens([AddedToken("<other>", **given)])
    with pytest.raises(UserError, match="loses or changes some text"):
        list(tokenizer.encode(made, ["a"]))


def test_a_tokenizer_of_the_hub(monkeypatch):
    asked = []

    def from_pretrained(name):
        asked.append(name)
        return of_letters()

    monkeypatch.setattr(
        tokenizer, "Tokenizer", type("Hub", (), {"from_pretrained": from_pretrained})
    )
    assert tokenizer.named("llama2").get_vocab() == of_letters().get_vocab()
    assert asked == ["hf-internal-testing/llama-tokenizer"]
    monkeypatch.setattr(tokenizer, "Tokenizer", None)  # the package has many errors
    with pytest.raises(
        UserError, match=r"tokenizer .*gpt2 from the .*\('None.*: without a network"
    ):
        tokenizer.named("gpt2")


# The token between documents


def like_llama_3(folder):
    made = of_letters((BEGIN, FINISH))
    first = [(BEGIN, made.token_to_id(BEGIN))]
    template = processors.TemplateProcessing(f"{BEGIN} $A", None, first)
    made.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return saved(folder, made)


@pytest.mark.parametrize(("end", "expected"), [("", BEGIN), (FINISH, FINISH)])
def test_the_token_between_documents(tmp_path, end, expected):
    made = tokenizer.load(like_llama_3(tmp_path), end)
    assert tokenizer.end_of(made) == (expected, made.token_to_id(expected))
    ((_, ids),) = tokenizer.encode(made, [f"a{expected}"])
    assert ids[0] == made.token_to_id(expected) and ids.count(ids[0]) == 1
    again = tokenizer.load(saved(tmp_path, made))  # as a run keeps it
    assert tokenizer.end_of(again)[0] == expected and again.to_str() == made.to_str()
    with pytest.raises(UserError, match=r"has no token <x>: give the one"):
        tokenizer.load(saved(tmp_path, made), "<x>")


@pytest.mark.parametrize("listed", tokenizer.ENDS)
def test_a_token_of_the_list_changes_no_tokenizer(tmp_path, listed):
    path = saved(tmp_path, of_letters((listed,)))
    assert '"post_processor":null' in tokenizer.load(path).to_str()
    assert tokenizer.load(path, listed).to_str() == tokenizer.load(path).to_str()


def test_the_text_of_a_run_has_the_token_of_the_flag(text, tmp_path):
    config = DataConfig(paths=(str(text),), tokenizer=str(like_llama_3(tmp_path)))
    found, other = (
        prepare(dataclasses.replace(config, end_token=end), quiet) for end in ("", FINISH)
    )
    assert [data.train.ids[:1].item() for data in (found, other)] == [256, 257]
    assert found.key != other.key
    trained = DataConfig(paths=(str(text),), vocab_size=303, end_token=FINISH)
    with pytest.raises(UserError, match=r"the tokenizer has no token <\|end_of_text\|>"):
        prepare(trained, quiet)
