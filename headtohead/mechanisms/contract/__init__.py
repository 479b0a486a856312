"""What every mechanism builds on: base class, options, stages, registry, cost counting."""
