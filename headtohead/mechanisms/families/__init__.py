"""Code shared by families of mechanisms: companions, deconstructed attention, Kuramoto options and groups."""
