"""What the mechanisms of one family share: companions, deconstructed attention, Kuramoto options and groups."""
