"""`python -m roundel`."""

from roundel.cli import main

if __name__ == "__main__":
    main()
