"""Sizes, layouts, residual spaces, the decoder, generation, and the conformance suite."""
