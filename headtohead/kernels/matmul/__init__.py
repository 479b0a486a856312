"""Projections and the chunked cross-entropy."""
