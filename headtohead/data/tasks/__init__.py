"""Tasks: labeled examples with relevant tokens marked, and evaluation sets scored without training."""
