"""The recipes: the numbers of the paper and of its code."""

import dataclasses

import pytest

from examples.trainer.settings import validation
from examples.trainer.settings.command_line import PRESETS, RECIPES, read_config_file

PAPER = [name for name in PRESETS if not name.endswith(("tiny", "micro"))]
PUBLISHED = RECIPES / "as_published"


def test_recipes_have_the_hyperparameters_of_the_paper():
    # A few cells, typed in again from the tables.
    rows = [
        ("gpt-small", 2048, 3.0, 0.01, 0.1, "col_row", 27.64),
        ("gpt-small-muon", 2048, 3.0, 0.005, 0.1, "none", 29.66),
        ("gpt-base", 4096, 7.2, 0.005, 0.1, "row", 19.98),
        ("gpt-large", 8192, 15.5, 0.01, 0.1, "row_col", 16.91),
        ("gpt-large-muon", 8192, 15.5, 0.02, 0.1, "none", 17.82),
        ("gpt-huge", 1024, 20.0, 0.01, 0.005, "row_col", 14.69),
        ("gpt-base-72b", 4096, 72.0, 0.005, 0.1, "row_col", 15.84),
        ("llama-60m", 1024, 1.1, 0.06, 0.1, "row_col", 25.25),
        ("llama-130m", 1024, 2.2, 0.02, 0.1, "col_row", 18.65),
        ("llama-350m", 4096, 6.4, 0.04, 0.1, "col_row", 13.41),
        ("llama-1b", 4096, 13.1, 0.02, 0.1, "row_col", 10.31),
        ("llama-7b", 1024, 19.8, 0.01, 0.005, "row_col", 10.12),
        ("llama-350m-72b-muon", 4096, 72.0, 0.04, 0.1, "none", 11.48),
    ]
    for name, context, billions, rate, decay, norm, perplexity in rows:
        line, config = PRESETS[name]
        assert config.model.context == context, name
        assert config.steps * 512 * context == pytest.approx(billions * 1e9, rel=1e-3), name
        optimizer = config.optimizer
        assert (optimizer.learning_rate, optimizer.weight_decay) == (rate, decay), name
        assert optimizer.norm == norm and line.endswith(f" {perplexity}"), name


@pytest.mark.parametrize("name", PAPER)
def test_settings_that_all_recipes_share(name):
    config, gpt = PRESETS[name][1], name.startswith("gpt")
    validation.check(config)
    assert config.batch_size == 512
    optimizer = config.optimizer
    assert (optimizer.ns_coeffs, optimizer.ns_steps, optimizer.clip_norm) == ("jordan", 5, 1.0)
    assert optimizer.name == ("muon" if name.endswith("-muon") else "muonplus")
    assert optimizer.adam_learning_rate == optimizer.learning_rate  # as in the paper's code
    assert optimizer.adam_weight_decay == optimizer.weight_decay
    assert (optimizer.adam_b1, optimizer.adam_b2) == (0.95, 0.95)
    assert optimizer.schedule == ("constant_linear" if gpt else "warmup_cosine")
    assert config.model.tied == gpt and config.model.family == ("gpt" if gpt else "llama")
    assert config.data.tokenizer == ("gpt2" if gpt else "llama2")


def test_as_published_sets_what_the_code_has():
    """Typed in again from the paper's code and configurations."""
    rows = [
        ("gpt-small", "gpt", 0.01, 0.1, 0.1, None),
        ("gpt-huge-muon", "gpt", 0.01, 0.005, 0.1, None),
        ("llama-60m", "llama-60m", 0.04, 0.05, 0.0, 0.0),
        ("llama-60m-muon", "llama", 0.06, 0.1, 0.0, 0.0),
        ("llama-350m", "llama-350m", 0.1, 0.1, 0.0, 0.0),
        ("llama-350m-72b", "llama", 0.04, 0.1, 0.0, 0.0),
    ]
    for name, file, rate, decay, floor, start in rows:
        plain = PRESETS[name][1]
        config = read_config_file(PUBLISHED / f"{file}.toml", plain)
        rule = dataclasses.replace(
            plain.optimizer,
            **{"learning_rate": rate, "adam_learning_rate": rate},
            **{"weight_decay": decay, "adam_weight_decay": decay},
            **{"schedule_floor": floor, "warmup_start": start},
            **{"norm_eps": 1e-7, "adam_eps_before_correction": True},
        )
        assert config == dataclasses.replace(plain, optimizer=rule), name


@pytest.mark.parametrize("name", PAPER)
def test_recipes_hold_out_what_their_evaluations_read(name):
    config = PRESETS[name][1]
    read = config.eval_batches * config.batch_size * config.model.context
    assert 1.2 * read < config.data.val_fraction * config.data.tokens
    assert config.data.val_fraction == 0.001 or config.data.val_fraction < 1.3 * read / (
        config.data.tokens
    )
