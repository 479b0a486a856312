"""Execution on a cluster: an engine such as Ray places tasks on nodes; the driver owns the plan and the run store."""
