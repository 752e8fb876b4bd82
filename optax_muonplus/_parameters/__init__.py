"""Facts about a tree of parameters: paths, which leaves are matrices and how, where they lie."""
