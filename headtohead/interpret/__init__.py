"""Attention maps, indicators, faithfulness of explanations, and the inspection of one text."""
