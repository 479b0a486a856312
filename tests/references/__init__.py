"""Mechanisms written a second time, from their formulas alone: loops, no code shared with the package."""
