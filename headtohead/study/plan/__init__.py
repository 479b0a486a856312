"""Planning of a study's runs: datasets, budgets, tuning, branches, populations, step timing."""
