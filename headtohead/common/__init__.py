"""Shared by all packages: errors, number parsing, atomic files, JSON schema, progress display."""

VERSION = "0.1.0"
