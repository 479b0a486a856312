"""Everything a study keeps on disk: run directories, leases, manifest, history, archives, repair."""
