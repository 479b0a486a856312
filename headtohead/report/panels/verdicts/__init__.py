"""Panels about verdicts."""
