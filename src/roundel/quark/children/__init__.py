"""What the processes find that a script starts: this folder is on their path, and holds a `quark`."""
