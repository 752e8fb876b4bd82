"""What an import, or a question for help, brings into a process; time is not measured here."""

import json
import re
import subprocess
import sys

from tests.support.documents import ROOT


def packages_after(code):
    """The modules in a new process that ran ``code``, and what it printed."""
    code = f"import json, sys\n{code}\nprint('MODULES', json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    said, _, modules = done.stdout.partition("MODULES ")
    return set(json.loads(modules)), said


def test_the_library_imports_little_beyond_optax():
    """The rooms that a training without them does not need come with their first use."""
    optax, _ = packages_after("import optax")
    own, _ = packages_after("import optax_muonplus")
    added = {name.partition(".")[0] for name in own - optax} - set(sys.stdlib_module_names)
    assert added - {"optax_muonplus", "numpy"} == set()
    assert "numpy.polynomial" not in own
    later = ("contrib", "heads", "int8", "bfloat16", "zero1", "convert")
    assert not [room for room in later if f"optax_muonplus.{room}" in own]
    code = "import optax_muonplus as omp; print(omp.contrib.NorMuon.__name__, *dir(omp))"
    used, said = packages_after(code)
    behind_transforms = {"int8", "bfloat16", "zero1"}  # whose door contrib opens
    found = {room for room in later if f"optax_muonplus.{room}" in used}
    assert found == {"contrib"} | behind_transforms
    code = """import jax.numpy as jnp, optax_muonplus as omp
omp.muonplus(0.02, mu_dtype='int8').init({'w': jnp.ones((4, 4))}); omp.take_over"""
    used, _ = packages_after(code)
    assert {room for room in later if f"optax_muonplus.{room}" in used} == {"int8", "convert"}
    assert said.split()[0] == "NorMuon" and "contrib" in said.split()


def test_help_of_the_trainer_needs_no_jax():
    """The flags that it names first are flags of a preset, whose help needs none either."""
    asking = "from examples.train import main\ntry: main({})\nexcept SystemExit: pass"
    modules, said = packages_after(asking.format(["--help"]))
    heavy = {"jax", "flax", "optax", "orbax", "numpy", "matplotlib"}
    assert not heavy & modules
    first = said.partition("matter first:")[2].partition("--resume")[0]
    modules, flags = packages_after(asking.format(["gpt-tiny", "--help"]))
    assert not heavy & modules
    named = re.findall(r"--[\w.-]+", first)
    assert len(named) >= 8 and [flag for flag in named if f"{flag} " not in flags] == []
