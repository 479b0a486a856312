"""Loss, reference lines and cost."""
