"""Settings before JAX starts, and fixtures: those of the tests of library and examples."""

# The first of these modules chooses platform, devices and caches, so that it is imported first.
# ruff: isort: skip_file
from tests.conftest import (  # noqa: F401
    cache,
    many_programs,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
    text,
)
from tests.examples.conftest import one_device, pictures, programs  # noqa: F401
