"""Anything that holds numbers becomes a numpy array here: tensors of any framework, and nested lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roundel.errors import DataError, did_you_mean
from roundel.types import Array, InputSpec, Sample


def is_array(value: object) -> bool:
    """Whether `value` is one array (numpy, or a tensor that can become one), not a container of arrays."""
    return isinstance(value, np.ndarray | np.generic) or (
        hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__array__")
    )


def to_array(value: object, where: str) -> Array:
    """Turn an array, a tensor or a nested list of numbers into a numpy array.

    Tensors are recognised by their methods, so that no framework is imported here.

    Args:
        value: what the user's data source gave.
        where: the sample and input, for the error.

    Raises:
        DataError: when there are no numbers in it, or they do not form a rectangular array.
    """
    if isinstance(value, np.ndarray):
        return value
    tensor: Any = value
    if hasattr(tensor, "detach") and hasattr(tensor, "cpu"):
        tensor = tensor.detach().cpu()
    try:
        array = np.asarray(tensor.numpy() if callable(getattr(tensor, "numpy", None)) else tensor)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            "A value cannot be turned into a numpy array",
            where=where,
            observed=f"{type(value).__name__}: {error}",
            expected="a numpy array, a CPU-convertible tensor or a rectangular list of numbers",
            hint="Convert the value yourself, e.g. tensor.float().numpy(), before handing it over.",
        ) from error
    if array.dtype == object and not is_array(value) and not isinstance(value, list | tuple):
        raise DataError(
            "A sample holds something that is not an array",
            where=where,
            observed=f"an object of type {type(value).__name__}",
            expected="a numpy array, a tensor or a list of numbers",
        )
    return array


_LABEL_NAMES = frozenset({"label", "labels", "target", "targets"})


def named_inputs(inputs: Sequence[InputSpec]) -> str:
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
        expected=f"a dict or a tuple with {len(inputs)} arrays for {named_inputs(inputs)}",
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
            expected=f"{len(inputs)}, for {named_inputs(inputs)}",
            hint="Yield a dict by input name. At most one surplus element (a label) is dropped.",
        )
    return {spec.name: part for spec, part in zip(inputs, value, strict=False)}


Shape = tuple[int, ...]


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether a type is floating point, including bfloat16, which numpy itself does not know."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def fit_shape(shape: Shape, spec: InputSpec, where: str, *, free_batch: bool) -> Shape:
    """The shape under which an array is fed, with a missing batch axis added.

    Args:
        shape: the shape of the array.
        spec: the model input.
        where: the sample, for the error.
        free_batch: whether the first dimension may be any size, because rows are regrouped later.

    Raises:
        DataError: when the shape cannot be the input's.
    """
    if spec.shape is None:
        return shape
    batch = spec.shape[:1]
    lacks_batch = len(shape) == len(spec.shape) - 1
    if lacks_batch and (free_batch or not isinstance(batch[0], int) or batch[0] == 1):
        fed = (1, *shape)
    else:
        fed = shape
    if len(fed) == len(spec.shape):
        wanted = (None, *spec.shape[1:]) if free_batch and batch else spec.shape
        fits = all(not isinstance(w, int) or w == d for w, d in zip(wanted, fed, strict=True))
        if fits and (not fed or fed[0] > 0 or batch[0] == 0):
            return fed
    raise DataError(
        f"A sample does not have the shape of input '{spec.name}'",
        where=where,
        observed=f"shape {list(shape)}",
        expected=str(spec),
        hint=_shape_hint(fed, spec),
    )


def _shape_hint(fed: Shape, spec: InputSpec) -> str | None:
    if spec.shape is None or len(fed) != len(spec.shape):
        return None
    if fed[0] == 0:
        return "The array has no rows."
    if len(fed) != 4:
        return None
    for axes, words in (((0, 3, 1, 2), "channels last"), ((0, 2, 3, 1), "channels first")):
        turned = tuple(fed[a] for a in axes)
        if all(not isinstance(w, int) or w == d for w, d in zip(spec.shape[1:], turned[1:], strict=True)):
            return f"The array looks like {words}: transpose it with np.transpose(x, {axes})."
    return None


def fit_dtype(array: Array, spec: InputSpec, where: str) -> Array:
    """Cast to the input's element type where no value can change its meaning.

    Float widths convert into each other, integer widths too when every value fits, booleans become 0 and 1.
    Integers never become floats silently: pixels 0..255 in a float input are a classic mistake.

    Raises:
        DataError: when the cast is refused or a value does not fit.
    """
    have, want = array.dtype, spec.dtype
    if have == want:
        return array
    if is_float(want) and is_float(have):
        with np.errstate(over="ignore"):
            cast = array.astype(want)
        lost = int(np.count_nonzero(np.isfinite(array) & ~np.isfinite(cast)))
        if lost:
            raise _misfit(array, spec, where, f"{lost} values overflow {want}")
        return cast
    if want.kind in "iub" and have.kind in "iub":
        low, high = (0, 1) if want.kind == "b" else (np.iinfo(want).min, np.iinfo(want).max)
        if array.size and (int(array.min()) < low or int(array.max()) > high):
            raise _misfit(array, spec, where, f"values from {int(array.min())} to {int(array.max())}")
        return array.astype(want)
    if want.kind in "OUST" and have.kind in "OUST":
        return array.astype(want)
    raise _misfit(array, spec, where, None)


def _misfit(array: Array, spec: InputSpec, where: str, values: str | None) -> DataError:
    hint = None
    if values is None:
        hint = f"Convert the data explicitly: x.astype(np.{spec.dtype})."
        if array.dtype.kind in "OUST":
            hint = "To read files, pass the path of their folder; a list must hold the arrays themselves."
        if array.dtype == np.uint8 and is_float(spec.dtype):
            hint = (
                "Raw pixels are not what a float model was trained on. Normalise them as in training, "
                "or ask for image preprocessing (mean, std, scale)."
            )
    return DataError(
        f"A sample does not have the type of input '{spec.name}'",
        where=where,
        observed=f"{array.dtype}" + (f", {values}" if values else ""),
        expected=str(spec),
        hint=hint,
    )


def check_finite(array: Array, spec: InputSpec, where: str) -> None:
    """Refuse NaN and infinity, which would spoil every range measured behind them.

    Raises:
        DataError: with the count of each.
    """
    if not is_float(array.dtype) or bool(np.isfinite(array).all()):
        return
    nans = int(np.count_nonzero(np.isnan(array)))
    infs = int(np.count_nonzero(np.isinf(array)))
    raise DataError(
        f"A sample for input '{spec.name}' holds values that are not finite",
        where=where,
        observed=f"{nans} NaN and {infs} infinite of {array.size} values",
        expected="finite numbers",
        hint="Remove the sample, or look for a division by zero in its preprocessing.",
    )


@dataclass(frozen=True, slots=True)
class Stack:
    """How an array holds samples.

    Args:
        count: number of samples along the first axis; None when the whole array is one sample.
        keep_axis: whether a sample keeps the first axis, with size 1, as its batch axis.
    """

    count: int | None
    keep_axis: bool = True

    def at(self, array: Array, index: int) -> Array:
        """One sample of the array."""
        if self.count is None:
            return array
        return array[index : index + 1] if self.keep_axis else array[index]

    def one(self, shape: Shape) -> Shape:
        """The shape of one sample."""
        if self.count is None:
            return shape
        return (1, *shape[1:]) if self.keep_axis else shape[1:]


def stack_of(shape: Shape, spec: InputSpec, where: str) -> Stack:
    """Read the rank of an array against the rank of its input.

    Same rank: the first axis are samples, each fed with batch 1, unless the array has exactly the fixed shape
    of the input and is one sample. One more: the first axis are samples that have a batch axis of their own.
    One
    less: a single sample without its batch axis. An input of unknown rank takes rows with batch 1.

    Raises:
        DataError: for any other rank.
    """
    if spec.shape is None:
        return Stack(shape[0] if shape else None)
    rank = len(spec.shape)
    exact = len(shape) == rank and (rank == 0 or isinstance(spec.shape[0], int))
    if exact and all(not isinstance(w, int) or w == d for w, d in zip(spec.shape, shape, strict=True)):
        return Stack(None)
    if len(shape) == rank:
        return Stack(shape[0])
    if len(shape) == rank + 1:
        return Stack(shape[0], keep_axis=False)
    if len(shape) == rank - 1:
        return Stack(None)
    raise DataError(
        f"The array for input '{spec.name}' does not have the rank of samples",
        where=where,
        observed=f"shape {list(shape)}, {len(shape)} axes",
        expected=f"{spec}: {rank} axes with the samples first, or {rank + 1} when each has a batch axis",
    )


def common_count(stacks: Mapping[str, Stack]) -> int:
    """The number of samples that all inputs agree on.

    Raises:
        DataError: when they do not.
    """
    counts = {name: 1 if stack.count is None else stack.count for name, stack in stacks.items()}
    if len(set(counts.values())) > 1:
        raise DataError(
            "The inputs have different numbers of samples",
            observed=", ".join(f"'{name}' has {count}" for name, count in counts.items()),
            expected="the same number of samples for every input",
        )
    return next(iter(counts.values()), 0)


def fixed_batch(inputs: Sequence[InputSpec]) -> int | None:
    """The batch size that the model insists on, or None where there is no single one.

    There is one when the first dimension of every input is a number, the same everywhere. Beside an open
    batch, a fixed first dimension is something else: a state, a table, the two sides of an image.
    """
    sizes = {spec.shape[0] if spec.shape else None for spec in inputs}
    only = sizes.pop() if len(sizes) == 1 else None
    return only if isinstance(only, int) and only > 0 else None


class Regrouper:
    """Cuts and joins batches so that each leaves with exactly the model's batch size.

    With no fixed batch every sample passes as it is. Rows that wait are copied: a source may reuse its
    buffer.

    Attributes:
        size: the model's batch size, None when it is open.
        leftover: rows that wait.
    """

    def __init__(self, inputs: Sequence[InputSpec]) -> None:
        self._names = [spec.name for spec in inputs]
        self.size = fixed_batch(inputs)
        self._waiting: list[Sample] = []
        self.leftover = 0

    def push(self, sample: Sample, where: str) -> Iterator[Sample]:
        """Take one conformed sample and give back all complete batches.

        Raises:
            DataError: when the inputs of one sample have different numbers of rows.
        """
        if self.size is None:
            yield sample
            return
        rows = self._rows(sample, where)
        start = 0
        while start + (need := self.size - self.leftover) <= rows:
            part = {name: sample[name][start : start + need] for name in self._names}
            yield self._joined(part)
            start += need
        if start < rows:
            self._waiting.append({name: sample[name][start:].copy() for name in self._names})
            self.leftover += rows - start

    def _joined(self, part: Sample) -> Sample:
        if not self._waiting:
            return part
        parts = [*self._waiting, part]
        self._waiting, self.leftover = [], 0
        return {name: np.concatenate([p[name] for p in parts]) for name in self._names}

    def _rows(self, sample: Sample, where: str) -> int:
        rows: dict[str, int] = {name: sample[name].shape[0] for name in self._names}
        if len(set(rows.values())) > 1:
            raise DataError(
                "The inputs of one sample have different batch sizes",
                where=where,
                observed=", ".join(f"'{name}' has {count}" for name, count in rows.items()),
                expected="the same number of rows for every input",
            )
        return next(iter(rows.values()))
