"""Which block format the attributes of AMD's operators describe, and what differs from its usual form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roundel.quark.errors import QuarkConfigError, expected_names

_ROUNDING = {0: "half_away", 1: "half_up", 2: "half_even"}
_ELEMENTS = {
    "fp8_e5m2": "mxfp8e5m2",
    "fp8_e4m3": "mxfp8e4m3",
    "fp6_e3m2": "mxfp6e3m2",
    "fp6_e2m3": "mxfp6e2m3",
    "fp4_e2m1": "mxfp4e2m1",
    "int8": "mxint8",
}
_WIDTHS = {11: "mx4", 13: "mx6", 16: "mx9"}
_USUAL = {
    "bfp16": {"bit_width": 16},
    "mx4": {"bit_width": 11},
    "mx6": {"bit_width": 13},
    "mx9": {"bit_width": 16},
}
_FIELDS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "block_size": ("block_size", int),
    "axis": ("axis", int),
    "bit_width": ("bit_width", int),
    "sub_block_size": ("sub_block_size", int),
    "sub_block_shift_bits": ("sub_block_shift_bits", int),
    "rounding_mode": ("rounding", _ROUNDING.__getitem__),
    "use_compiler_version_cpu_kernel": ("compiler", bool),
    "convert_to_bfloat_before_bfp": ("bfloat16_first", bool),
}


@dataclass(frozen=True, slots=True)
class _Family:
    """One of AMD's block operators: the option with its attributes, and which of them name the format."""

    option: str
    naming: tuple[str, ...]
    format: Callable[[Mapping[str, Any]], str | None]


def _bfp(given: Mapping[str, Any]) -> str | None:
    if given.get("bfp_method", "to_bfp") == "to_bfp":
        return "bfp16"
    return _WIDTHS.get(given.get("bit_width", 16), "mx9")


def _mx(given: Mapping[str, Any]) -> str | None:
    return _ELEMENTS.get(given.get("element_dtype", "int8"))


_FAMILIES = {
    "bfp": _Family("BFPAttributes", ("bfp_method",), _bfp),
    "mx": _Family("MXAttributes", ("element_dtype",), _mx),
}
OPTIONS = tuple(family.option for family in _FAMILIES.values())


def block_type(word: str, options: Mapping[str, Any]) -> str:
    """The recipe's block format for a family and its attributes; other types pass through.

    Raises:
        QuarkConfigError: there is no such format.
    """
    family = _FAMILIES.get(word)
    if family is None:
        return word
    given = options.get(family.option) or {}
    found = family.format(given)
    if found is None:
        raise QuarkConfigError(
            "There is no such block format.",
            where=f"extra_options['{family.option}']",
            observed=given.get("element_dtype"),
            **expected_names(str(given.get("element_dtype")), _ELEMENTS),
        )
    return found


def block_values(option: str, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Recipe values for the attributes that do more than name the format.

    Raises:
        QuarkConfigError: an attribute or its value is unknown.
    """
    family = next(f for f in _FAMILIES.values() if f.option == option)
    usual = _USUAL.get(family.format(given) or "", {})
    for name, value in given.items():
        if name in family.naming or usual.get(name) == value:
            continue
        if name not in _FIELDS:
            raise QuarkConfigError(
                f"Block formats have no '{name}'.",
                where=f"extra_options['{option}']",
                **expected_names(name, (*_FIELDS, *family.naming)),
            )
        path, made = _FIELDS[name]
        try:
            yield f"blocks.{path}", made(value)
        except (KeyError, ValueError, TypeError) as error:
            raise QuarkConfigError(
                f"The block attribute '{name}' cannot be {value!r}.", where=f"extra_options['{option}']"
            ) from error
