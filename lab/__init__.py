"""Research and measurement: imports `examples` and the library, and neither imports it."""
