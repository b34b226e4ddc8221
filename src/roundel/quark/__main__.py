"""`python -m roundel.quark script.py …`."""

from __future__ import annotations

import sys

from roundel.quark.importing import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
