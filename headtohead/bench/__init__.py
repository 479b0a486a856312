"""What is measured by the clock: ours beside what others use, in one process."""
