"""Studies: spec, matching, run store, executors, statistics, verdicts."""
