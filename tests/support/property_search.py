"""How hypothesis searches: deterministic, without a deadline, since first examples compile."""

from hypothesis import settings

SEARCH = settings(max_examples=60, deadline=None, derandomize=True)
