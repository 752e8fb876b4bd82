"""Mathematics as MathML, which browsers draw by themselves: no script, no font, no other host."""

import html

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx


def _markup(latex: str, display: str) -> str:
    if "\n" in latex.strip() and "&" in latex and r"\begin" not in latex:
        latex = rf"\begin{{aligned}}{latex}\end{{aligned}}"
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
