"""Norms, rotary positions, gates and phases."""
