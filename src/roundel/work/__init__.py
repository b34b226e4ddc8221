"""Where work runs (threads, processes, a Ray cluster) and what a run has done so far, on disk."""
