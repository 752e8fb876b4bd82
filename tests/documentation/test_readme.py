"""The README's code runs, and prints what the README says it prints; so does that of its pages.

Cells of pages are executed when the site is built. Blocks marked ``py`` need a model, and run here.
"""

import contextlib
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_muonplus
from tests.support.documents import PAGES, README


def test_code_block_prints_what_is_written_below_it():
    code, printed = re.search(r"```python\n(.*?)```\n+```text\n(.*?)```", README, re.S).groups()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    assert output.getvalue() == printed


def test_readme_and_home_show_both_lines():
    muon = "tx = omp.muon(0.02)  # Optax's Muon\n"
    lines = muon + "tx = omp.muonplus(0.02)  # with Muon+'s normalization\n"
    assert lines in README and lines in PAGES["index.md"]


def py_blocks(text):
    return re.findall(r"```py\n(.*?)```", text, re.S)


def test_code_blocks_of_pages_run():
    mesh, _ = py_blocks(PAGES["howto/meshes.md"])
    (in_order,) = py_blocks(PAGES["explain/speed.md"])
    (links,) = py_blocks(PAGES["howto/variant.md"])
    names = {"omp": optax_muonplus, "optax": optax}
    plain = {"params": {"dense": {"kernel": jnp.ones((8, 8))}}, "jax": jax}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(mesh, "meshes.md", "exec"), names | plain)
    stacked = {"params": jnp.ones((2, 8, 8)), "state": jnp.ones(2), "jax": jax}
    stacked["train_step"] = lambda params, state: (params + 1, state)
    exec(compile(in_order, "speed.md", "exec"), stacked)
    params, _ = stacked["train_step"](stacked["params"], stacked["state"])
    assert params.format.layout.major_to_minor == (0, 1, 2)

    names["params"] = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}}
    exec(compile(links, "variant.md", "exec"), names)
    updates, _ = names["tx"].update(
        names["params"], names["tx"].init(names["params"]), names["params"]
    )
    # Columns end with equal norms, plus the decay, times the learning rate.
    step = -updates["dense"]["kernel"] / 0.02 - 0.1
    norms = jnp.linalg.norm(step, axis=1)
    np.testing.assert_allclose(norms, norms[0], rtol=1e-5)
