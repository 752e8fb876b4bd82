"""The polar factor, fast: the iteration, its products, and the choice of both."""
