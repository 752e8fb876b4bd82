"""Links on trees: what a chain means, layouts, records, and the place that compiles parts."""
