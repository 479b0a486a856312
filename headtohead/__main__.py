"""Entry point of `python -m headtohead`, the same as `h2h`."""

from headtohead.cli.main import main

if __name__ == "__main__":
    main()
