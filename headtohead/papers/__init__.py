"""What belongs to a single paper."""
