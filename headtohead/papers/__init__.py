"""Code that belongs to a single paper."""
