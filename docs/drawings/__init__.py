"""The pictures of the site, as SVG that reads in light and dark mode.

``python -m docs.drawings`` writes those that README.md shows; the site draws all of them when it
is built.
"""

from docs.drawings.comparison import comparison
from docs.drawings.devices import all_to_alls, collectives
from docs.drawings.gains import gains
from docs.drawings.method import chain, layouts
from docs.drawings.plots import rates_by_width, regions
from docs.drawings.shakespeare import shakespeare
from docs.drawings.tokens import tokens

DRAWINGS = {
    "chain": chain,
    "layouts": layouts,
    "all_to_alls": all_to_alls,
    "collectives": collectives,
    "comparison": comparison,
    "gains": gains,
    "regions": regions,
    "rates_by_width": rates_by_width,
    "shakespeare": shakespeare,
    "tokens": tokens,
}
