"""What only the checkout needs is in requirements/, and the wheel has no extra for it."""

import re
import tomllib

from tests.support.documents import ROOT

FILES = {path.name: path.read_text() for path in (ROOT / "requirements").glob("*.txt")}


def test_extras_of_the_wheel_are_for_the_code_in_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project["project"]["optional-dependencies"]) == {"cuda12", "cuda13", "tpu"}
    assert "/requirements" in project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]


def written():
    """All that a source distribution has, by its own list, as text; a workflow too, if it is there.

    Without git, which a source distribution knows nothing of.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    for pattern in [*listed, "/.github", "/pyproject.toml"]:
        for found in ROOT.glob(pattern.strip("/")):
            for path in found.rglob("*") if found.is_dir() else [found]:
                passed_by = {"__pycache__", "_build", "results", "CHANGELOG.md"}
                if path.is_file() and not passed_by.intersection(path.parts):
                    yield path.read_text(errors="ignore")


def test_every_file_that_is_named_somewhere_exists_and_no_extra_is():
    text = "\n".join(written())
    named = set(re.findall(r"requirements/([\w-]+\.txt)", text))
    assert named and named <= set(FILES)
    extras = re.findall(r"(?:-e ['\"]\.|optax_muonplus)\[([\w,-]+)\]['\"]", text)
    assert extras and set(",".join(extras).split(",")) <= {"cuda12", "cuda13", "tpu"}
