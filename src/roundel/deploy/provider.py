"""What the VitisAI execution provider is told, and which formats it takes on a device."""

from __future__ import annotations

import json

from roundel.check.number_format import Recognised
from roundel.errors import ModelError, RecipeError
from roundel.targets.devices import Device, Format

CACHE_FOLDER = "cache"
CONFIG_FILE = "vaiml_config.json"
OPTIMIZE_LEVELS = (1, 2, 3)


def check_device(recognised: Recognised, device: Device) -> None:
    """Refuse a format that the device's compilers do not take."""
    if recognised.format in device.formats:
        return
    takes = ", ".join(sorted(f.name for f in device.formats))
    what = recognised.format.name
    if recognised.format is Format.FLOAT:
        what = "a float model, which the compiler would turn into BF16"
    raise ModelError(
        f"The NPU of {device.name} ({device.processors}) does not take {what}.",
        observed=f"{recognised.format.name}: {recognised.reason}",
        expected=takes,
        hint=f"Quantize the float model with --preset {takes.split(', ')[0].lower()}, "
        "or deploy to stx, stx-halo or krk.",
    )


def provider_options(kind: Format, device: Device, cache_key: str) -> dict[str, str]:
    """Options of the VitisAI execution provider, in the current spelling; paths from the kit's folder."""
    own = device.integer_options if kind.integer else {"config_file": CONFIG_FILE}
    # Anything but "0" keeps the compiled model in memory: no cache on disk, and no assignment report.
    cache = {"cache_dir": CACHE_FOLDER, "cache_key": cache_key, "enable_cache_file_io_in_mem": "0"}
    return {**own, **cache}


def vaiml_config(optimize_level: int) -> str:
    """The BF16 compiler's config file: its two passes and the options that AMD documents."""
    if optimize_level not in OPTIMIZE_LEVELS:
        raise RecipeError(
            "The BF16 compiler has no such optimization level.",
            where="optimize_level",
            observed=optimize_level,
            expected="1, 2 or 3",
        )
    partition = {
        "name": "vaiml_partition",
        "plugin": "vaip-pass_vaiml_partition",
        "vaiml_config": {"optimize_level": optimize_level, "preferred_data_storage": "auto"},
    }
    tree = {
        "passes": [{"name": "init", "plugin": "vaip-pass_init"}, partition],
        "target": "VAIML",
        "targets": [{"name": "VAIML", "pass": ["init", "vaiml_partition"]}],
    }
    return json.dumps(tree, indent=2) + "\n"
