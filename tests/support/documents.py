"""What README, CONTRIBUTING and the pages of the site say about the repository, parsed."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
# Pages of the site, by their path in docs/.
PAGES = {
    path.relative_to(ROOT / "docs").as_posix(): path.read_text()
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if "_build" not in path.parts
}


def imported(path):
    """Full names of all that a file imports, with the names after ``from ... import``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module
            if node.level:  # only "_core" has such imports, because it runs by itself
                assert node.level == 1 and path.parent.name == "_core", f"{path}: relative import"
                module = f"optax_muonplus._core.{module}"
            yield from (f"{module}.{alias.name}" for alias in node.names)
