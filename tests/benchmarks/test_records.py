"""The JSON record of a benchmark: the command that gives it, and where it is written."""

import dataclasses
import json
from pathlib import Path

from benchmarks import records


@dataclasses.dataclass(frozen=True)
class Config:
    tokens: tuple[int, ...] = (1, 2)
    learning_rate: float = 0.1
    rivals: bool = True
    bfloat16: bool = False
    library: Path | None = None
    out: Path | None = None


def test_flags_are_empty_for_the_defaults():
    assert records.flags(Config(out=Path("somewhere"))) == []


def test_flags_spell_each_type_of_option_as_on_the_command_line():
    config = Config((3, 4), 0.5, rivals=False, bfloat16=True, library=Path("other"))
    assert records.flags(config) == [
        "--tokens 3 4", "--learning-rate 0.5", "--no-rivals", "--bfloat16", "--library other"
    ]  # fmt: skip


def test_record_holds_command_machine_and_options_but_not_the_output_folder(tmp_path):
    config = Config(library=Path("other"), out=tmp_path / "new")
    records.write(config.out, "x", records.describe_run("a.b", config))
    record = json.loads((tmp_path / "new" / "x.json").read_text())
    assert record["command"] == "python -m a.b --library other"
    assert {"device", "processor", "jax", "optax_muonplus"} <= record["machine"].keys()
    assert record["config"] == {
        "tokens": [1, 2], "learning_rate": 0.1, "rivals": True, "bfloat16": False,
        "library": "other",
    }  # fmt: skip


def test_nothing_is_written_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records.write(None, "x", {"a": 1})
    assert not list(tmp_path.iterdir())
