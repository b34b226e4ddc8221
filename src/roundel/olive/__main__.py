"""`python -m roundel.olive FILE`: Olive's package config with Roundel's pass in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from olive.package_config import OlivePackageConfig

from roundel.model.files import write_text

PASS = {
    "module_path": "roundel.olive.quantization.RoundelQuantization",
    "supported_providers": ["*"],
    "supported_accelerators": ["*"],
    "supported_precisions": ["*"],
    "supported_algorithms": ["*"],
    "supported_quantization_encodings": ["*"],
    "extra_dependencies": [],
}


def main(arguments: list[str]) -> int:
    """Write the file; returns the exit status."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("usage: python -m roundel.olive FILE\n")
        return 2
    known = json.loads(Path(OlivePackageConfig.get_default_config_path()).read_text(encoding="utf-8"))
    known["passes"]["RoundelQuantization"] = PASS
    write_text(Path(arguments[0]), json.dumps(known, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
