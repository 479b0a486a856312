"""The shell: a thin layer over the api; nothing can be done only here."""
