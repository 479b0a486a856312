"""The exact theory of the toy model."""
