"""What differs between two versions of nested settings, and what of it a checkpoint minds."""

from examples.trainer.runs.checkpoint import differing
from examples.trainer.settings.validation import MISSING, differences

OLD = {"step": 3, "config": {"model": {"width": 8, "depth": 2}, "name": None}}
NEW = {"step": 3, "config": {"model": {"width": 16, "bias": False}, "name": None}}


def test_entries_that_differ_are_named_with_both_values():
    assert list(differences(OLD, OLD)) == []
    assert [tuple(entry) for entry in differences(OLD, NEW)] == [
        ("config.model.width", 8, 16),
        ("config.model.depth", 2, MISSING),
        ("config.model.bias", MISSING, False),
    ]


def test_a_checkpoint_minds_what_it_has_and_no_setting_that_was_added_since():
    assert differing(OLD, NEW) == [
        "model.width was 8, and is 16",
        "model.depth was 2, and is None",
    ]
