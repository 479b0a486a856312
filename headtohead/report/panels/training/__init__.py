"""Panels about training and its cost."""
