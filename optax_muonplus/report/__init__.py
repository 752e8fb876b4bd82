"""What an optimizer will do with each parameter, as a table."""

from optax_muonplus.report.table import describe as describe
