"""The coupled integrator: plain, as torch operators, in Triton."""
