"""What identifies a class, score function or file of a user."""
