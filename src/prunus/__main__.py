"""`python -m prunus` and the command `prunus`."""

from prunus.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
