"""`python -m headtohead` is `h2h`."""

from headtohead.cli.main import main

if __name__ == "__main__":
    main()
