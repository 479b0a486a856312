"""From a study to its runs: datasets, budgets, tuning, branches, populations, step timing."""
