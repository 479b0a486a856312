"""Run a plan: worker processes, the claim loop, one run or one population, the causality gate."""
