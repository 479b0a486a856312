"""Integrations with other programs: experiment trackers, installed by an optional extra."""
