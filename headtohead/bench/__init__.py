"""Benchmarks of kernels, training and decoding, with peers measured in the same process."""
