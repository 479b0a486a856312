"""Where other programs are met: trackers, each behind an optional extra."""
