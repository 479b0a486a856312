"""One way for tokens to attend to each other, one file each; base.py is the contract."""
