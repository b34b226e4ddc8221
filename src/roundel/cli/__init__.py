"""The command line: it parses, calls one function, and prints. It decides nothing."""

from roundel.cli.app import main

__all__ = ["main"]
