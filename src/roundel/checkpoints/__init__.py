"""What a run has done so far, on disk: files that are whole or not there, and never pickled."""

from roundel.checkpoints.store import Memory, Store, open_store

__all__ = ["Memory", "Store", "open_store"]
