"""Attention cores and decoding, each with its plain PyTorch reference."""
