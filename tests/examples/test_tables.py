"""Tables in a terminal."""

import jax.numpy as jnp
import pytest

import optax_muonplus as omp
from examples.trainer.system.tables import fitted

PARAMS = {
    "blocks": {
        str(i): {"query": {"kernel": jnp.ones((96, 4, 24))}, "up": {"kernel": jnp.ones((8, 128))}}
        for i in range(3)
    },
    "embed": {"embedding": jnp.ones((50, 96))},
}
TABLE = omp.describe(PARAMS)
LEAVE_OUT = ("rule", "rms", "scale", "group")


@pytest.mark.parametrize("width", [60, 80, 100])
def test_columns_are_left_out_until_a_table_fits(width):
    shown = fitted(TABLE, width, LEAVE_OUT)
    assert max(map(len, shown.splitlines())) <= width
    kept = shown.splitlines()[0].split("  ")[0]
    assert kept == "parameter" and "blocks/{0..2}/query/kernel" in shown and "8x128" in shown
    words = " ".join(shown.split())
    assert "muon: 6 parameters, 6 matrices" in words
    gone = words.partition("lack of room: ")[2].split(", ")
    assert gone == list(LEAVE_OUT[: len(gone)])
    assert not {"rule", "rms"} & set(shown.splitlines()[0].split()) or width == 100


def test_what_fits_is_left_as_it_is():
    for text in (TABLE, "all parameters: adamw"):
        assert fitted(text, 200, LEAVE_OUT) == text
    assert fitted("all parameters: adamw", 10, LEAVE_OUT) == "all parameters: adamw"
