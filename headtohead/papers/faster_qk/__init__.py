"""The toy of faster_qk: a one-layer model with exact theory of how the learning rate of the qk circuit shapes attention."""
