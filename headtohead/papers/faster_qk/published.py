"""Numbers to reproduce: the published tables of the toy, or those of an independent re-implementation if unpublished.

Run names are those of `runs.RUNS`. Every table has its tolerance.
"""

from __future__ import annotations

# Mean alpha at the end of a run (published rule or number of epochs) over at least three seeds, and tolerance.
ENDS: dict[tuple[str, str], tuple[float, float]] = {
    ("FAFO default", "stop"): (0.381, 0.01),
    ("FAFO", "stop"): (0.349, 0.005),
    ("FACO", "end"): (0.869, 0.005),
    ("CAFO", "stop"): (0.366, 0.005),
    ("CACO", "end"): (0.512, 0.01),
    ("CACO L=128", "end"): (0.469, 0.005),
    ("CACO r=5 L=128", "end"): (0.748, 0.02),
    ("CACO ramp 1->10 L=128", "end"): (0.732, 0.01),
    ("FAFO r=20", "stop"): (0.787, 0.005),
    ("FAFO r=20", "end"): (0.854, 0.005),
    ("FAFO ramp 1->40", "end"): (0.667, 0.005),
}
SURE = 0.99
"""Minimum share of test sequences whose label has a probability above .8 at the end."""

# Alpha at the first epoch whose mean loss is below 1, .1, .01, .001.
AT_LOSS: dict[str, tuple[tuple[float | None, ...], float]] = {
    "FAFO": ((0.350, 0.349, 0.350, 0.350), 0.01),
    "FAFO default": ((0.349, 0.352, 0.360, 0.379), 0.02),
    "CAFO": ((0.347, 0.354, 0.360, 0.365), 0.01),
    "CACO": ((0.355, 0.436, 0.525, 0.619), 0.02),
    "FACO": ((0.350, 0.377, 0.653, 0.882), 0.01),
    "FAFO r=20": ((0.350, 0.392, 0.595, 0.781), 0.01),
    "FAFO ramp 1->40": ((0.350, 0.349, 0.361, 0.480), 0.01),
    "CACO L=128": ((0.360, 0.445, None, None), 0.01),
    "CACO r=5 L=128": ((0.387, 0.587, 0.724, None), 0.02),
    "CACO ramp 1->10 L=128": ((0.369, 0.548, 0.708, None), 0.01),
}

# Mean loss of each 100 epochs, and tolerance.
HUNDREDS: dict[str, tuple[tuple[float, ...], float]] = {
    "FAFO default": ((2.901, 1.310, 0.081, 0.009, 0.005, 0.003, 0.002), 0.005),
    "FACO": (
        (2.522, 1.030, 0.564, 0.376, 0.280, 0.222, 0.183, 0.156, 0.132, 0.087, 0.033, 0.015),
        0.003,
    ),
    "CACO r=5 L=128": ((3.284, 2.212, 1.466, 0.928, 0.493, 0.216, 0.101), 0.07),
    "CACO ramp 1->10 L=128": ((3.285, 2.220, 1.500, 1.035, 0.711, 0.468, 0.293), 0.02),
}

# Imposed attention at alpha .2, .4, .6, .8, 1: final loss, and the gain from slightly more; tolerances are relative.
FIXED_LOSS: dict[str, tuple[tuple[float, ...], float]] = {
    "fixed collapsed": ((0.598, 0.158, 0.0645, 0.0346, 0.0216), 0.02),
    "fixed factorised": ((0.0038, 0.0015, 0.00089, 0.00063, 0.00049), 0.08),
}
FIXED_GAIN: dict[str, tuple[tuple[float, ...], float]] = {
    "fixed collapsed": ((2.73, 1.01, 0.384, 0.183), 0.1),
    "fixed factorised": ((0.114, 0.025, 0.0102, 0.0062), 0.1),
}
GAIN_RATIO = 0.1
"""Upper bound of the gain of a factored output part divided by that of a collapsed one, at every alpha below 1."""

# The reduced equations: alpha at losses 1, .1, .01, .001, 1e-4 by ratio.
REDUCED: dict[float, tuple[float, ...]] = {
    0.01: (0.0955, 0.1085, 0.1217, 0.1353, 0.1488),
    0.1: (0.1220, 0.1735, 0.2144, 0.2520, 0.2875),
    1.0: (0.2153, 0.3485, 0.4423, 0.5221, 0.5911),
    10.0: (0.4443, 0.6952, 0.8159, 0.8835, 0.9221),
    100.0: (0.8180, 0.9577, 0.9804, 0.9887, 0.9927),
}

# Tolerances of the theory of factors.
LAW, CONSERVED, BALANCE, EMULATED = 1e-10, 1e-4, 0.01, 0.06
INTEGRATED, INVARIANT = 1e-4, 1e-6
