"""The README's code runs, and prints what the README says it prints."""

import contextlib
import io
import pathlib
import re

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


def test_code_block_prints_what_is_written_below_it():
    code, printed = re.search(r"```python\n(.*?)```\n+```text\n(.*?)```", README, re.S).groups()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    assert output.getvalue() == printed


def test_file_tree_names_files_that_exist():
    root = pathlib.Path(__file__).parent.parent
    tree = re.search(r"## What is where\n+```text\n(.*?)```", README, re.S).group(1)
    folder, named = root, []
    for line in tree.splitlines():
        indent = len(line) - len(line.lstrip())
        name = line.split()[0]
        path = root / name if indent == 0 else folder / name
        if indent == 0 and name.endswith("/"):
            folder = path
        named.append(path)
    assert len(named) > 15
    for path in named:
        assert path.exists(), path
