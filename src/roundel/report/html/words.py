"""What the figures of a layer mean, in a sentence or two."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundel.report.html.numbers import percent

if TYPE_CHECKING:
    from roundel.compare.types import Difference, TensorComparison, WeightComparison

_MUCH = 0.5
_CUT_OFF = 0.0005
_POOR_USE = 0.5
_ONE_CHANNEL = 0.25


def causes(tensor: TensorComparison, weights: tuple[WeightComparison, ...]) -> tuple[str, ...]:
    """What the error that a layer introduces comes from, and what its range does to it."""
    return (*_making(tensor, weights), *_range(tensor), *_channels(tensor))


def origin(t: TensorComparison) -> str:
    """How much of the tensor's error its layer makes, and how much comes with its inputs."""
    if t.introduced is None:
        return "Error made here cannot be told apart from error of its inputs."
    made, passed = _power(t.introduced), _power(t.inherited)
    if made == passed == 0:
        return "Exact: no error here, and none from its inputs."
    if made == 0:
        return "Exact: all of its error comes from its inputs."
    if t.place == "input":
        return "A model input: all of its error is made by storing it."
    share = made / (made + passed)
    if share >= _MUCH:
        return f"{percent(share)} of its error power is made here."
    return f"{percent(1 - share)} of its error power comes from its inputs."


def _power(difference: Difference | None) -> float:
    return 0.0 if difference is None else difference.mse


def _making(t: TensorComparison, weights: tuple[WeightComparison, ...]) -> tuple[str, ...]:
    """What the introduced error is made of: storing the result, or the layer's weights and arithmetic."""
    made, stored = _power(t.introduced), _power(t.rounding)
    if made == 0 or t.place == "input" or t.rounding is None:
        return ()
    share = min(1.0, stored / made)
    if share >= _MUCH:
        return (f"{percent(share)} of what it adds comes from storing the result as {_kind(t)}.",)
    what = "its weights" if weights else "its arithmetic"
    return (f"{percent(1 - share)} of what it adds comes from {what}, not from storing the result.",)


def _range(t: TensorComparison) -> tuple[str, ...]:
    found = []
    if t.saturated is not None and t.saturated >= _CUT_OFF:
        found.append(f"The range cuts off {percent(t.saturated)} of the values.")
    if t.range_use is not None and t.range_use < _POOR_USE:
        found.append(f"The values span only {percent(t.range_use)} of the stored range.")
    return tuple(found)


def _channels(t: TensorComparison) -> tuple[str, ...]:
    if not t.worst_channels or t.channel_axis is None:
        return ()
    worst = t.worst_channels[0]
    many = t.shape[t.channel_axis] if t.channel_axis < len(t.shape) else 0
    if worst.share < _ONE_CHANNEL or many < 4 / _ONE_CHANNEL:
        return ()
    return (f"Channel {worst.channel} alone holds {percent(worst.share)} of the error.",)


def _kind(t: TensorComparison) -> str:
    return t.storage.dtype if t.storage is not None else "float"
