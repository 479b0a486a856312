"""Code shared by families of mechanisms: companions, deconstructed attention, score functions, Kuramoto options and groups."""
