"""Panels about where arms look."""
