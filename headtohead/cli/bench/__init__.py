"""h2h bench: timed comparisons, one file per command; the last line printed is one JSON document."""
