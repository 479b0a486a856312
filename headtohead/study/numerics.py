"""The number of this package's arithmetic: bumped whenever a golden loss moves, so that old runs are not mixed in."""

NUMERICS = 1
