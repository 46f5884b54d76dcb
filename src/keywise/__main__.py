"""`python -m keywise` is the command `keywise`."""

from keywise.cli import main

if __name__ == "__main__":
    main()
