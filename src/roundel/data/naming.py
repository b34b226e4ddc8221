"""From what a data source yields (array, tuple, mapping) to one value per model input, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roundel.data.arrays import is_array
from roundel.errors import DataError, did_you_mean
from roundel.types import InputSpec

_LABEL_NAMES = frozenset({"label", "labels", "target", "targets"})


def listed(inputs: Sequence[InputSpec]) -> str:
    """The model's inputs as one line of an error message."""
    return "; ".join(str(spec) for spec in inputs) or "no inputs"


def by_name(
    value: object, inputs: Sequence[InputSpec], where: str, notes: dict[str, None]
) -> dict[str, object]:
    """Give every model input its part of one yielded value.

    Args:
        value: an array (one input), a tuple or list in input order, or a mapping by input name.
        inputs: the model's inputs.
        where: the sample, for errors.
        notes: receives a sentence when a label was dropped (a dict, because order matters and repeats do
            not).

    Raises:
        DataError: when names or number do not match.
    """
    if isinstance(value, Mapping):
        return _from_mapping(value, inputs, where, notes)
    if isinstance(value, list | tuple) and any(is_array(v) for v in value):
        return _from_sequence(value, inputs, where, notes)
    if len(inputs) == 1:
        return {inputs[0].name: value}
    raise DataError(
        "A sample does not say which input is which",
        where=where,
        observed=f"one {type(value).__name__}",
        expected=f"a dict or a tuple with {len(inputs)} arrays for {listed(inputs)}",
    )


def _from_mapping(
    value: Mapping[object, object], inputs: Sequence[InputSpec], where: str, notes: dict[str, None]
) -> dict[str, object]:
    names = [spec.name for spec in inputs]
    missing = [name for name in names if name not in value]
    extra = [str(key) for key in value if key not in names]
    labels = [key for key in extra if key.casefold() in _LABEL_NAMES]
    unknown = [key for key in extra if key not in labels]
    if missing or unknown:
        wrong = unknown[0] if unknown else missing[0]
        near = did_you_mean(wrong, missing if unknown and missing else names if unknown else extra)
        raise DataError(
            f"A sample has no value for input '{missing[0]}'"
            if missing
            else f"A sample has a value for '{wrong}', which is not an input of the model",
            where=where,
            observed="keys " + ", ".join(f"'{key}'" for key in value),
            expected="keys " + ", ".join(f"'{name}'" for name in names),
            hint=near or "Use the model's input names as keys, no more and no fewer.",
        )
    if labels:
        notes[f"key {', '.join(repr(k) for k in labels)} is not a model input and was dropped"] = None
    return {name: value[name] for name in names}


def _from_sequence(
    value: Sequence[object], inputs: Sequence[InputSpec], where: str, notes: dict[str, None]
) -> dict[str, object]:
    surplus = len(value) - len(inputs)
    if surplus == 1:
        # What a torch DataLoader over a labelled set gives: [images, labels].
        notes[f"element {len(inputs) + 1} of each sample (a label?) is not a model input and was dropped"] = (
            None
        )
    elif surplus != 0:
        raise DataError(
            "A sample has the wrong number of arrays",
            where=where,
            observed=f"{len(value)} arrays",
            expected=f"{len(inputs)}, for {listed(inputs)}",
            hint="Yield a dict by input name. At most one surplus element (a label) is dropped.",
        )
    return {spec.name: part for spec, part in zip(inputs, value, strict=False)}
