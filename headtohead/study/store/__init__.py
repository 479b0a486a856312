"""Files of a study: run directories, leases, manifest, history, archives, repair."""
