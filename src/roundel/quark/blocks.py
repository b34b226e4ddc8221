"""Which block format the attributes of the custom operators describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundel.quark.errors import QuarkConfigError

_MX_FIXED = {"block_size": 32, "rounding_mode": 2}
_PLAIN = {"convert_to_bfloat_before_bfp": 0, "use_compiler_version_cpu_kernel": 0}
_PRIME = {
    **_PLAIN,
    "bfp_method": "to_bfp_prime",
    "block_size": 16,
    "sub_block_size": 2,
    "sub_block_shift_bits": 1,
    "rounding_mode": 2,
}
_BFP: Mapping[str, Mapping[str, Any]] = {
    "bfp16": {**_PLAIN, "bfp_method": "to_bfp", "bit_width": 16, "block_size": 8, "rounding_mode": 2},
    "mx4": {**_PRIME, "bit_width": 11},
    "mx6": {**_PRIME, "bit_width": 13},
    "mx9": {**_PRIME, "bit_width": 16},
}
_MX: Mapping[str, Mapping[str, Any]] = {
    "mxfp8e5m2": {"element_dtype": "fp8_e5m2", **_MX_FIXED},
    "mxfp8e4m3": {"element_dtype": "fp8_e4m3", **_MX_FIXED},
    "mxfp6e3m2": {"element_dtype": "fp6_e3m2", **_MX_FIXED},
    "mxfp6e2m3": {"element_dtype": "fp6_e2m3", **_MX_FIXED},
    "mxfp4e2m1": {"element_dtype": "fp4_e2m1", **_MX_FIXED},
    "mxint8": {"element_dtype": "int8", **_MX_FIXED},
}
# Family: the option with its attributes, the formats, and the one that no attributes mean.
_FAMILIES: Mapping[str, tuple[str, Mapping[str, Mapping[str, Any]], str]] = {
    "bfp": ("BFPAttributes", _BFP, "bfp16"),
    "mx": ("MXAttributes", _MX, "mxint8"),
}
_FREE = ("axis",)  # it follows from each operator


def block_type(word: str, options: Mapping[str, Any]) -> str:
    """The recipe's block format for a family and its attributes; other types pass through.

    Raises:
        QuarkConfigError: no block format of Roundel's has these attributes.
    """
    if word not in _FAMILIES:
        return word
    option, formats, usual = _FAMILIES[word]
    given = options.get(option) or {}
    if not given:
        return usual
    wanted = {key: value for key, value in given.items() if key not in _FREE}
    for name, attributes in formats.items():
        if all(attributes.get(key) == value for key, value in wanted.items()) and _decisive(wanted):
            return name
    known = "; ".join(f"{name}: {dict(attributes)}" for name, attributes in formats.items())
    raise QuarkConfigError(
        "No block format has these attributes.",
        where=f"extra_options['{option}']",
        observed=dict(given),
        expected=known,
    )


def _decisive(wanted: Mapping[str, Any]) -> bool:
    """Whether the attributes say which format of the family is meant."""
    return "element_dtype" in wanted or "bit_width" in wanted or "bfp_method" in wanted
