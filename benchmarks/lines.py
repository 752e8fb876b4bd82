"""Lines of code in files and in functions: without blank lines, comments and documentation."""

import ast
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path

NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def count(paths: Iterable[Path]) -> dict[str, int]:
    """Adds up the lines of files, with everything and of code alone."""
    texts = [path.read_text() for path in paths]
    return {
        "lines": sum(len(text.splitlines()) for text in texts),
        "code": sum(len(code_lines(text)) for text in texts),
    }


def code_lines(text: str) -> set[int]:
    """Finds the lines that are neither blank nor a comment nor documentation in a string."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE and token.string:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(ast.Constant(str()), lineno=first, end_lineno=int(last)):
                lines.difference_update(range(first, last + 1))
    return lines


def by_function(text: str) -> dict[int, int]:
    """Maps the first line of each function, with its decorators, to its number of code lines.

    The lines of a function within a function count there alone.
    """
    code, found = code_lines(text), {}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    for node in functions:
        inner = [_lines(x) for x in ast.walk(node) if isinstance(x, kinds) and x is not node]
        found[_lines(node).start] = len(code.intersection(_lines(node)).difference(*inner))
    return found


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> range:
    first = min(x.lineno for x in (function, *function.decorator_list))
    return range(first, (function.end_lineno or first) + 1)
