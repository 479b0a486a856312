"""Live page of a running study."""
