"""h2h new: files to start from, one file per command."""
