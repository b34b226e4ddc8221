"""Float-to-float passes that make a model ready to be planned."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from roundel.passes.activations import decompose_hard_swish, fuse_gelu, scale_clip_bounds
from roundel.passes.batch_norms import batch_norm_to_conv, fold_batch_norm, fold_pad
from roundel.passes.cleanup import (
    fold_constants,
    lift_constants,
    remove_dead_code,
    remove_no_ops,
    unshare_biases,
    unshare_weights,
)
from roundel.passes.fixed_inputs import fix_inputs, input_constants, take_branches
from roundel.passes.norms import fuse_instance_norm, fuse_l2_norm, fuse_layer_norm
from roundel.passes.operators import (
    explicit_attributes,
    nchw_to_nhwc,
    reduce_mean_to_pool,
    split_large_pools,
    split_to_slice,
)
from roundel.passes.shapes import fix_input_shapes, refresh_shapes
from roundel.recipe.settings import Prepare

__all__ = ["PassReport", "input_constants", "prepare", "refresh_shapes", "settle_branches"]


@dataclass(frozen=True, slots=True)
class PassReport:
    """What one pass did, and how long it took (shape refreshes it needed included)."""

    name: str
    rewrites: int
    seconds: float


def _passes(o: Prepare) -> Iterator[tuple[bool, str, Callable[[ir.Model], int]]]:
    """Every pass in order: whether the options ask for it, what reports call it, and the pass.

    A pass changes only the main graph, in place, and says how often it did. It rewrites a place only after it
    has proved that no graph output and no other reader, captures inside bodies of If, Loop and Scan included,
    can see a difference beyond the tolerance that its docstring states.
    """
    yield bool(o.fixed_inputs), "fixed inputs", partial(fix_inputs, values=o.fixed_inputs)
    yield bool(o.fixed_shapes), "fixed shapes", partial(fix_input_shapes, shapes=o.fixed_shapes)
    yield True, "dead code", remove_dead_code  # a dead reader would keep a live value from being folded
    yield o.fold_constants, "constants to initializers", lift_constants
    yield True, "no-ops", remove_no_ops  # first without copies of weights behind Identity, then fold
    yield o.fold_constants, "constant folding", fold_constants
    yield True, "no-ops", remove_no_ops  # folding shows that a Pad or a Reshape does nothing
    yield o.fold_constants, "branches that are known", _resolve_branches
    yield o.fuse_instance_norm, "fuse instance norm", fuse_instance_norm  # the stricter match comes first
    yield o.fuse_layer_norm, "fuse layer norm", fuse_layer_norm
    yield o.fuse_gelu, "fuse gelu", fuse_gelu
    yield o.fuse_l2_norm, "fuse l2 norm", fuse_l2_norm
    yield o.fold_batch_norm, "fold batch norm", fold_batch_norm
    yield o.decompose_hard_swish, "decompose hard swish", decompose_hard_swish
    yield o.fold_pad, "fold pad", fold_pad
    yield o.unshare_biases, "unshare biases", unshare_biases
    yield o.unshare_weights or o.scale_clip_bounds, "unshare weights", unshare_weights
    yield o.reduce_mean_to_global_average_pool, "reduce mean to global average pool", reduce_mean_to_pool
    yield o.split_large_pools, "split large pools", split_large_pools  # also those just made from means
    yield o.split_to_slice, "split to slice", split_to_slice
    yield o.batch_norm_to_conv, "batch norm to conv", batch_norm_to_conv  # those that could not be folded
    yield o.nchw_to_nhwc, "nchw to nhwc", nchw_to_nhwc
    yield o.explicit_conv_attributes, "explicit conv attributes", explicit_attributes
    yield (o.scale_clip_bounds, "scale clip bounds", scale_clip_bounds)  # needs weights of their own
    yield True, "dead code", remove_dead_code


def _resolve_branches(model: ir.Model) -> int:
    """Takes the branches of Ifs with constant conditions, and folds what that shows to be constant."""
    total = 0
    while taken := take_branches(model):
        total += taken
        lift_constants(model)
        refresh_shapes(model)
        remove_no_ops(model)
        fold_constants(model)
    return total


def settle_branches(model: ir.Model, options: Prepare) -> None:
    """Makes the inputs that the options fix constants, and takes the branches that are known; nothing else.

    Where there is no If, not even constants are folded: for a view of the model as it was written.
    """
    fix_inputs(model, options.fixed_inputs)
    if options.fold_constants and any(node.op_type == "If" for node in model.graph):
        lift_constants(model)
        fold_constants(model)
        _resolve_branches(model)


_BLIND = (remove_dead_code, lift_constants, unshare_biases, unshare_weights)  # to shapes and types
_FIXED = ("fixed inputs", "fixed shapes")  # change what shapes follow from


def prepare(
    model: ir.Model, options: Prepare, notify: Callable[[PassReport], None] | None = None
) -> tuple[PassReport, ...]:
    """Run the passes that the options ask for, in order, in place.

    The names and the order of the graph inputs and outputs stay as they are. Shapes are current
    afterwards.

    Args:
        model: the float model; it is changed.
        options: which passes run.
        notify: called with each report as soon as its pass is done.

    Returns:
        One report for each pass that ran, in order.

    Raises:
        RecipeError: the options contradict the model.
        ModelError: the model is broken.
    """
    reports: list[PassReport] = []
    stale = True
    for wanted, name, action in _passes(options):
        if not wanted:
            continue
        started = time.perf_counter()
        if stale and action not in _BLIND and name not in _FIXED:
            refresh_shapes(model)
            stale = False
        rewrites = action(model)
        stale = stale or rewrites > 0
        report = PassReport(name, rewrites, time.perf_counter() - started)
        reports.append(report)
        if notify is not None:
            notify(report)
    if stale:
        refresh_shapes(model)
    return tuple(reports)
