"""The one trainer: optimiser groups, schedules, checkpoints."""
