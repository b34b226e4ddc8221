"""`python -m roundel.ort script.py …`."""

from __future__ import annotations

import sys

from roundel.ort.running import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
