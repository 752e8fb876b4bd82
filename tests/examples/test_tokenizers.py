"""Tokenizers: trained, from a file or the hub; what they lose, and where documents begin."""

import dataclasses

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from examples.trainer.data import tokenizer
from examples.trainer.data.prepare import prepare
from examples.trainer.settings.data import DataConfig
from examples.trainer.system.errors import UserError
from tests.support.trainer import quiet

BEGIN, FINISH = "<|begin_of_text|>", "<|end_of_text|>"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def test_a_trained_tokenizer_is_lossless(tmp_path):
    text = "def f(x):\n\treturn  x\r\n\n  naïve 日本語 🎉 \x00 <|endoftext|> end \n"
    trained = tokenizer.train(["some other text"], 300)
    (tmp_path / "t.json").write_text(trained.to_str(), encoding="utf-8")
    loaded = tokenizer.load(tmp_path / "t.json")
    [(_, [end, *ids])] = tokenizer.encode(loaded, [text])
    assert loaded.decode(ids, skip_special_tokens=False) == text
    assert end == tokenizer.end_id(loaded) and end not in ids  # END inside a text is only text


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


def sentence_piece(words=(SPACE, f"{SPACE}the", "the", "end"), late=False):
    """LLaMA's form: bytes are tokens, spaces are lines. `late`: bytes are decoded before lines."""
    known = ["<unk>", "<s>", "</s>", *tokenizer.BYTES, *words, *sorted(set("".join(words)))]
    merges = [("t", "h"), ("th", "e"), (SPACE, "the")]
    known = list(dict.fromkeys([*known, "th"]))
    merges = merges if SPACE in words else merges[:2]
    numbers = {x: i for i, x in enumerate(known)}
    made = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    lines, in_bytes = [decoders.Replace(SPACE, " ")], [decoders.ByteFallback(), decoders.Fuse()]
    order = [*in_bytes, *lines] if late else [*lines, *in_bytes]
    made.decoder = decoders.Sequence([*order, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def unknown_words(**options):
    made = Tokenizer(models.WordLevel({"<s>": 0, "[UNK]": 1, "the": 2}, **options))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


LOSSLESS = {
    "letters": of_letters(),
    "a space before": of_letters(normalizer=normalizers.Prepend(" ")),
    "sentence piece": sentence_piece(),
}
LOSSY = {
    "unknown words": unknown_words(unk_token="[UNK]"),
    "no unknown words": unknown_words(),
    "no words": Tokenizer(models.BPE()),
    "pieces": Tokenizer(models.Unigram([("<s>", 0.0), ("t", -1.0)], None, False)),
    "no letter for spaces": of_letters(without="\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"),
    "lower case": of_letters(normalizer=normalizers.Lowercase()),
    "compatible": of_letters(normalizer=normalizers.NFKC()),
    "stripped": of_letters(normalizer=normalizers.Strip()),
    "no line for spaces": sentence_piece(words=("the", "end")),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_tokenizers_that_keep_the_text_are_taken(tmp_path, name):
    assert tokenizer.load(saved(tmp_path, LOSSLESS[name]))


@pytest.mark.parametrize("name", LOSSY)
def test_tokenizers_that_lose_text_are_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"own\.json loses text, .* tokens for all bytes"):
        tokenizer.load(saved(tmp_path, LOSSY[name]))


@pytest.mark.parametrize("name", LOSSLESS)
def test_the_bytes_of_tokens_are_those_of_the_text(tmp_path, name):
    made = tokenizer.load(saved(tmp_path, LOSSLESS[name]))
    made.add_tokens(["größer"])  # no special token: a word of the text
    text = "the end — größer than 日本 the end"
    lengths, ids = tokenizer.token_bytes(made), made.encode(text, add_special_tokens=False).ids
    assert lengths[ids].sum() - len(text.encode()) in (0, 1)  # a space before the text
    assert lengths[tokenizer.end_id(made)] == 0


@pytest.mark.parametrize("late", [False, True])
def test_bin_files_whose_bytes_are_counted_wrongly_are_refused(tmp_path, late):
    """Without a token for the space, three tokens of bytes are one byte of text."""
    made = sentence_piece(("the", "end"), late) if late else sentence_piece()
    path = saved(tmp_path, made)
    ids = tokenizer.load(path).encode("the end of the end " * 90).ids
    for split, n in (("train", None), ("val", 900)):
        np.asarray(ids[:n], "<u2").tofile(tmp_path / f"{split}.bin")
    config = DataConfig(source="bin", paths=(str(tmp_path),), tokenizer=str(path))
    if late:
        with pytest.raises(
            UserError, match=r"are .* bytes of text, and count as .*: bits per byte"
        ):
            prepare(config, quiet)
    else:
        found = prepare(config, quiet)
        assert abs(found.val.meta.bytes - len(found.tokenizer.decode(ids[:900]))) <= 1


@pytest.mark.parametrize(
    ("content", "said"),
    {
        None: "neither gpt2 nor llama2 nor a tokenizer.json",
        "{": "is not a tokenizer",
        of_letters(special=()).to_str(): "has none of .*</s>: give .* as --data.end-token",
        Tokenizer(models.BPE({"</s>": 0, "b": 2}, [])).to_str(): "leaves out numbers",
    }.items(),
)
def test_bad_tokenizers(text, tmp_path, content, said):
    path = tmp_path / "t.json"
    if content:
        path.write_text(content)
    with pytest.raises(UserError, match=said):
        prepare(DataConfig(paths=(str(text),), tokenizer=str(path)), quiet)


def test_a_tokenizer_of_the_hub_is_downloaded_once(tmp_path, monkeypatch):
    local, asked = of_letters(), []

    class Hub:
        from_file = Tokenizer.from_file

        @staticmethod
        def from_pretrained(name):
            asked.append(name)
            return local

    monkeypatch.setattr(tokenizer, "Tokenizer", Hub)
    vocabularies = [tokenizer.named("llama2", tmp_path).get_vocab() for _ in range(2)]
    assert vocabularies == [local.get_vocab()] * 2
    assert asked == ["hf-internal-testing/llama-tokenizer"]


def test_a_hub_that_is_not_there_is_a_sentence(tmp_path, monkeypatch):
    def offline(name):
        raise OSError("no network")

    monkeypatch.setattr(tokenizer, "Tokenizer", type("Hub", (), {"from_pretrained": offline}))
    with pytest.raises(
        UserError, match=r"tokenizer .*gpt2 from the .*: no network\. Without a net"
    ):
        tokenizer.named("gpt2", tmp_path)


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
    with pytest.raises(UserError, match=r"--data.end-token <x>: .* has no such token"):
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
    trained = DataConfig(paths=(str(text),), vocab_size=300, end_token=FINISH)
    with pytest.raises(UserError, match=r"end-token .*: the tokens .* were made with <\|endoftext"):
        prepare(trained, quiet)
