"""Tasks: labelled examples with relevant tokens marked, and known sets scored without training."""
