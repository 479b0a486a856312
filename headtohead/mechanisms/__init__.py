"""Token-mixing layers, one file each; contract/base.py defines their interface."""
