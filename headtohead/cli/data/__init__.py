"""h2h data: corpora and tasks, one file per command."""
