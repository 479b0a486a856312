"""A one-layer model small enough for exact theory: how the speed of the qk circuit shapes attention."""
