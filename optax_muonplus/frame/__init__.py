"""How a parameter is a batch of matrices, and the records of leaves."""

from optax_muonplus.frame.layout import MatrixLayout as MatrixLayout
from optax_muonplus.frame.leaves import ADAM as ADAM
from optax_muonplus.frame.leaves import GIVEN as GIVEN
from optax_muonplus.frame.leaves import MUON as MUON
from optax_muonplus.frame.leaves import UNKNOWN as UNKNOWN
from optax_muonplus.frame.leaves import LeafInfo as LeafInfo
from optax_muonplus.frame.leaves import ResolvedTree as ResolvedTree
from optax_muonplus.frame.paths import Path as Path
from optax_muonplus.frame.paths import flatten_tree as flatten_tree
from optax_muonplus.frame.paths import flatten_with_names as flatten_with_names
from optax_muonplus.frame.paths import is_hole as is_hole
from optax_muonplus.frame.paths import path_name as path_name
from optax_muonplus.frame.paths import path_of_keys as path_of_keys
from optax_muonplus.frame.paths import without_boxes as without_boxes
from optax_muonplus.frame.sharding import LeafSharding as LeafSharding
from optax_muonplus.frame.sharding import added_axes as added_axes
from optax_muonplus.frame.sharding import as_named as as_named
from optax_muonplus.frame.sharding import axes_of_type as axes_of_type
from optax_muonplus.frame.sharding import usable_axes as usable_axes
from optax_muonplus.frame.sharding import varying_axes as varying_axes
from optax_muonplus.frame.spec import AxisNumbers as AxisNumbers
from optax_muonplus.frame.spec import DimensionNumbers as DimensionNumbers
from optax_muonplus.frame.spec import DimensionNumbersTree as DimensionNumbersTree
from optax_muonplus.frame.spec import MatrixSpec as MatrixSpec
from optax_muonplus.frame.spec import MuonDimensionNumbers as MuonDimensionNumbers
from optax_muonplus.frame.spec import Shape as Shape
