"""What runs recommend in place of the paper's defaults, as one name."""

import types
from collections.abc import Mapping
from typing import Any

RECOMMENDED: Mapping[str, Any] = types.MappingProxyType(
    {"norm": "row_col", "shape_scale": "max", "match_frobenius": True}
)
