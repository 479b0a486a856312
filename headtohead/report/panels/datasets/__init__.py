"""Panels about corpora and tasks."""
