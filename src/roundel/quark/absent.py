"""Names that scripts may import and Roundel does otherwise: using one says what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from roundel.quark.errors import QuarkConfigError

_SEARCH = (
    "search of the first kind",
    "Use AutoSearchPro with get_auto_search_config, or `roundel search` over recipe fields.",
)
_CALIBRATOR = (
    "calibrating apart from a run",
    "Pass SaveAndRestore=FILE: ranges are then kept for the next run of the same model and data.",
)
ABSENT: dict[str, tuple[str, str]] = {
    "AutoSearch": _SEARCH,
    "AutoSearchConfig": _SEARCH,
    "SearchSpace": _SEARCH,
    "create_calibrator_float_scale": _CALIBRATOR,
    "create_calibrator_power_of_two": _CALIBRATOR,
}


class Absent:
    """Stands for a name; it can be imported, and explains itself when used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        what, instead = ABSENT[self._name]
        raise QuarkConfigError(f"{self._name}: Roundel has no {what}.", hint=instead)

    def __repr__(self) -> str:
        return f"<{self._name}: not in Roundel>"
