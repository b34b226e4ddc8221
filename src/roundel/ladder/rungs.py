"""The rungs, from the format that runs fastest on the NPU to the one that loses least."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from roundel.errors import RecipeError, did_you_mean
from roundel.targets.devices import Format, device_named


@dataclass(frozen=True, slots=True)
class Rung:
    """One try.

    Attributes:
        name: as the table and the options say it.
        title: what it is.
        preset: the recipe it starts from.
        format: what the NPU must take.
        family: rungs of one family prepare the model alike, so that they share statistics.
        work: about how many float passes over the calibration data it takes.
        changes: what differs from the preset.
        torch: whether it learns by gradients.
        mixed: whether layers of it are widened one after the other.
    """

    name: str
    title: str
    preset: str
    format: Format
    family: str
    work: float
    changes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    torch: bool = False
    mixed: bool = False


RUNGS: tuple[Rung, ...] = (
    Rung("xint8", "XINT8, calibration only", "xint8_plain", Format.XINT8, "xint8_plain", 5),
    Rung("xint8-fast", "XINT8, effort fast", "xint8", Format.XINT8, "xint8", 25),
    Rung("xint8-adaround", "XINT8, AdaRound", "xint8_adaround", Format.XINT8, "xint8", 120, torch=True),
    Rung("xint8-adaquant", "XINT8, AdaQuant", "xint8_adaquant", Format.XINT8, "xint8", 120, torch=True),
    Rung("a8w8", "A8W8, effort fast", "a8w8", Format.A8W8, "float", 25),
    Rung("a16w8", "A16W8, effort fast", "a16w8", Format.A16W8, "float", 25),
    Rung("mixed", "A8W8, worst layers in A16W8", "a8w8", Format.A16W8, "float", 30, mixed=True),
    Rung("bf16", "BF16", "bf16", Format.BF16, "bf16", 5),
)


def chosen_rungs(names: Sequence[str] | None) -> tuple[Rung, ...]:
    """The rungs that a user names, in the ladder's order; all when none are named.

    Raises:
        RecipeError: there is no such rung.
    """
    if names is None:
        return RUNGS
    known = {rung.name: rung for rung in RUNGS}
    wanted = [name.strip().casefold().replace("_", "-") for name in names]
    for name in wanted:
        if name not in known:
            raise RecipeError(
                f"There is no rung '{name}'.",
                where="--rungs",
                expected=", ".join(known),
                hint=did_you_mean(name, known),
            )
    if not wanted:
        raise RecipeError("No rung was named.", where="--rungs", expected=", ".join(known))
    return tuple(rung for rung in RUNGS if rung.name in wanted)


def refused(rungs: Iterable[Rung], device: str | None) -> dict[str, str]:
    """Why a rung cannot be tried, by name.

    Raises:
        RecipeError: there is no such device.
    """
    machine = None if device is None else device_named(device)
    has_torch = importlib.util.find_spec("torch") is not None
    reasons = {}
    for rung in rungs:
        if machine is not None and rung.format not in machine.formats:
            formats = machine.formats - {Format.FLOAT}
            taken = ", ".join(f.value.upper() for f in Format if f in formats)
            reasons[rung.name] = f"{machine.name} takes {taken} only"
        elif rung.torch and not has_torch:
            reasons[rung.name] = "torch is not installed (pip install 'roundel[torch]')"
    return reasons
