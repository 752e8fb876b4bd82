"""Mathematics as MathML, which browsers draw by themselves: no script, no font, no other host."""

import html
import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx


def _broken(latex: str) -> str:
    r"""One equation a line, at each ``\qquad`` or ``\\``: several do not fit a page."""
    if r"\begin" in latex:
        return latex
    if "&" not in latex:
        lines = re.split(r"\\qquad|\\\\", latex)
        if len(lines) == 1:
            return latex
        latex = r" \\ ".join("& " + line.strip() for line in lines)
    return rf"\begin{{split}}{latex}\end{{split}}"


def _markup(latex: str, display: str) -> str:
    if display == "block":
        latex = _broken(latex)
    return convert(latex.strip(), display=display).replace(
        "<math ", f'<math aria-label="{html.escape(latex.strip(), quote=True)}" ', 1
    )


def _inline(self, node: nodes.math) -> None:
    self.body.append(_markup(node.astext(), "inline"))
    raise nodes.SkipNode


def _block(self, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", CLASS="math-block"))
    self.body.append(_markup(node.astext(), "block"))
    self.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the renderer by the name "mathml"."""
    app.add_html_math_renderer(
        "mathml", inline_renderers=(_inline, None), block_renderers=(_block, None)
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}
