"""How a parameter is a batch of matrices."""

from optax_muonplus.frame.layout import MatrixLayout as MatrixLayout
from optax_muonplus.frame.spec import AxisNumbers as AxisNumbers
from optax_muonplus.frame.spec import DimensionNumbers as DimensionNumbers
from optax_muonplus.frame.spec import DimensionNumbersTree as DimensionNumbersTree
from optax_muonplus.frame.spec import MatrixSpec as MatrixSpec
from optax_muonplus.frame.spec import MuonDimensionNumbers as MuonDimensionNumbers
from optax_muonplus.frame.spec import Shape as Shape
from optax_muonplus.frame.spec import all_integers as all_integers
from optax_muonplus.frame.spec import with_rule as with_rule
