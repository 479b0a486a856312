"""Norms, short convolutions, rotary positions, gates and phases."""
