"""Panels about who won and by how much."""
