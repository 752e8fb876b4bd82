"""The preset of GPT-2's small network."""

import jax
import pytest

from examples.trainer.models.state_dict import abstract
from examples.trainer.settings.hugging_face import to_hugging_face
from examples.trainer.settings.presets import PRESETS

VOCABULARY = 50_257
OURS = to_hugging_face(PRESETS["gpt2-small"][1].model, VOCABULARY, "float32", VOCABULARY - 1)


def test_it_has_as_many_parameters_as_gpt2():
    shapes = abstract(PRESETS["gpt2-small"][1].model, VOCABULARY)
    assert sum(x.size for x in jax.tree.leaves(shapes)) == 124_439_808


def test_it_is_the_default_configuration_of_transformers():
    theirs = pytest.importorskip("transformers").GPT2Config()
    names = ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "layer_norm_epsilon")
    for name in (*names, "activation_function", "tie_word_embeddings"):
        assert OURS[name] == getattr(theirs, name), name


def test_a_step_has_half_a_million_tokens_and_the_run_ten_billion():
    config = PRESETS["gpt2-small"][1]
    step = config.batch_size * config.model.context
    assert step == 2**19
    assert abs(config.steps * step - 10e9) < step
