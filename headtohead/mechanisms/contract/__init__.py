"""Base class, options, stages, registry and cost counting of mechanisms."""
