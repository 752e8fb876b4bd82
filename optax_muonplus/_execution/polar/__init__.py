"""The fast polar factor: the iteration, its products, and the choice of both."""
