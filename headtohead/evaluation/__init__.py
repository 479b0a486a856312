"""Loss, task scores, zero-shot scores, cost, reference lines, stability."""
