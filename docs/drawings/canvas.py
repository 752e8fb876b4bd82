"""A picture as SVG text: shapes, words and arrows in colours that a page or a theme can change."""

from collections.abc import Sequence
from html import escape

Point = tuple[float, float]

# Colours are variables. A file shows those of the reader's system; a page of the site sets them by
# its own switch (docs/_static/site.css).
_STYLE = """
.picture{--ink:#1f2328;--soft:#59636e;--faint:#d1d9e0;--one:#0969da;--two:#bc4c00;--three:#1a7f37;
--four:#8250df;font:13px system-ui,sans-serif}
@media(prefers-color-scheme:dark){.picture{--ink:#f0f6fc;--soft:#9198a1;--faint:#3d444d;--one:#4493f8;
--two:#f0883e;--three:#3fb950;--four:#ab7df8}}
"""


def number(value: float) -> str:
    """Two decimals at most: the files stay small."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


class Canvas:
    """Shapes in the order in which they are drawn; positions in pixels from the top left."""

    def __init__(self, width: float, height: float, words: str) -> None:
        """Starts an empty picture; ``words`` describe it to those who do not see it."""
        self.width, self.height, self.words = width, height, words
        self._parts: list[str] = []

    def rect(
        self,
        at: Point,
        size: Point,
        colour: str = "faint",
        *,
        opacity: float = 1.0,
        outline: str | None = None,
        radius: float = 0,
    ) -> None:
        """A rectangle; ``colour="none"`` leaves it empty."""
        fill = "none" if colour == "none" else f"var(--{colour})"
        line = f' stroke="var(--{outline})" stroke-width="1.5"' if outline else ""
        alpha = f' fill-opacity="{number(opacity)}"' if opacity < 1 else ""
        (x, y), (width, height) = map(number, at), map(number, size)
        corner = f' rx="{number(radius)}"' if radius else ""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}"'
            f"{alpha}{line}{corner}/>"
        )

    def text(
        self,
        at: Point,
        words: str,
        *,
        colour: str = "ink",
        anchor: str = "middle",
        size: int = 13,
        bold: bool = False,
    ) -> None:
        """One line of words; ``anchor`` is "start", "middle" or "end"."""
        x, y = map(number, at)
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x}" y="{y}" fill="var(--{colour})" text-anchor="{anchor}"'
            f' font-size="{size}"{weight}>{escape(words)}</text>'
        )

    def line(self, points: Sequence[Point], colour: str = "ink", width: float = 2) -> None:
        """A line through points."""
        joined = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self._parts.append(
            f'<polyline points="{joined}" fill="none" stroke="var(--{colour})"'
            f' stroke-width="{number(width)}"/>'
        )

    def dot(self, at: Point, colour: str = "ink", radius: float = 4) -> None:
        """A filled circle."""
        x, y = map(number, at)
        self._parts.append(f'<circle cx="{x}" cy="{y}" r="{radius}" fill="var(--{colour})"/>')

    def arrow(self, start: Point, end: Point, colour: str = "soft") -> None:
        """A straight arrow."""
        (x0, y0), (x1, y1) = start, end
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        dx, dy = (x1 - x0) / length * 6, (y1 - y0) / length * 6
        self.line([start, end], colour, 1.5)
        self.line(
            [
                (x1 - dx - dy / 1.5, y1 - dy + dx / 1.5),
                end,
                (x1 - dx + dy / 1.5, y1 - dy - dx / 1.5),
            ],
            colour,
            1.5,
        )

    def svg(self) -> str:
        """The whole file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" role="img"'
            f' width="{number(self.width)}" height="{number(self.height)}"'
            f' viewBox="0 0 {number(self.width)} {number(self.height)}">'
            f"<title>{escape(self.words)}</title><style>{_STYLE}</style>{''.join(self._parts)}</svg>"
        )
