"""Panels about attention."""
