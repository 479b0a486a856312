"""h2h bench: what is measured by the clock, one file a benchmark; the last line is one JSON document."""
