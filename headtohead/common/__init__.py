"""What every row may use: errors, numbers people type, files that are never half written, progress."""
