"""The shell: a thin layer over api.py; nothing can be done only here."""
