"""What runs recommend in place of the paper's defaults, as one name."""

from typing import Any

RECOMMENDED: dict[str, Any] = {
    "norm": "row_col",
    "shape_scale": "max",
    "match_frobenius": True,
}
