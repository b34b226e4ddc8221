"""The NPUs as data: what each takes, and the provider options it needs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from roundel.deploy.formats import ModelFormat, Recognised
from roundel.errors import ModelError, RecipeError, did_you_mean

CACHE_FOLDER = "cache"
CONFIG_FILE = "vaiml_config.json"
OPTIMIZE_LEVELS = (1, 2, 3)

_PHOENIX_XCLBIN = "${RYZEN_AI_INSTALLATION_PATH}/voe-4.0-win_amd64/xclbins/phoenix/4x4.xclbin"


@dataclass(frozen=True, slots=True)
class Device:
    """One generation of NPU.

    Attributes:
        name: the short name that AMD's documents use.
        processors: what it is sold in.
        formats: what its compilers take.
        integer_options: provider options for an integer model.
    """

    name: str
    processors: str
    formats: frozenset[ModelFormat]
    integer_options: tuple[tuple[str, str], ...] = field(default=(("target", "X2"),))

    @property
    def needs_xclbin(self) -> bool:
        """Whether the session must be told which NPU binary to load."""
        return any(key == "xclbin" for key, _ in self.integer_options)


# Since Ryzen AI 1.7 the provider rounds half to even unless told otherwise; XDNA 1 needs the older way.
_XDNA1_OPTIONS = (("target", "X1"), ("xclbin", _PHOENIX_XCLBIN), ("xlnx_enable_py3_round", "0"))
_XDNA1 = frozenset({ModelFormat.XINT8})
_XDNA2 = frozenset(ModelFormat)

DEVICES = {
    device.name: device
    for device in (
        Device("phx", "Phoenix: Ryzen 7040", _XDNA1, _XDNA1_OPTIONS),
        Device("hpt", "Hawk Point: Ryzen 8040, 200", _XDNA1, _XDNA1_OPTIONS),
        Device("stx", "Strix: Ryzen AI 300", _XDNA2),
        Device("stx-halo", "Strix Halo: Ryzen AI Max", _XDNA2),
        Device("krk", "Krackan: Ryzen AI 300", _XDNA2),
    )
}


def device_named(name: str) -> Device:
    """The device, or an error that names those there are."""
    device = DEVICES.get(name.strip().lower().replace("_", "-"))
    if device is None:
        raise RecipeError(
            f"There is no device '{name}'.",
            expected=", ".join(f"{d.name} ({d.processors})" for d in DEVICES.values()),
            hint=did_you_mean(name, DEVICES),
        )
    return device


def check_device(recognised: Recognised, device: Device) -> None:
    """Refuse a format that the device's compilers do not take."""
    if recognised.format in device.formats:
        return
    takes = ", ".join(sorted(f.value for f in device.formats))
    what = recognised.format.value
    if recognised.format is ModelFormat.FLOAT:
        what = "a float model, which the compiler would turn into BF16"
    raise ModelError(
        f"The NPU of {device.name} ({device.processors}) does not take {what}.",
        observed=f"{recognised.format.value}: {recognised.reason}",
        expected=takes,
        hint=f"Quantize the float model with --preset {takes.split(', ')[0].lower()}, "
        "or deploy to stx, stx-halo or krk.",
    )


def provider_options(kind: ModelFormat, device: Device, cache_key: str) -> dict[str, str]:
    """Options of the VitisAI execution provider, in the current spelling; paths from the kit's folder."""
    own = dict(device.integer_options) if kind.integer else {"config_file": CONFIG_FILE}
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
