"""Independent implementations of the mechanisms, from their formulas: loops, no code shared with the package."""
