"""What several commands use: option groups, help pages, tables, printed results."""
