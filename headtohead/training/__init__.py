"""Training: trainer, populations, optimizer groups, schedules, checkpoints."""
