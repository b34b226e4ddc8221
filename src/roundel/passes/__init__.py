"""Float-to-float passes that make a model ready to be planned."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from roundel.passes.activations import DecomposeHardSwish, FuseGelu, ScaleClipBounds
from roundel.passes.base import Pass, PassReport
from roundel.passes.batch_norms import BatchNormToConv, FoldBatchNorm, FoldPad
from roundel.passes.cleanup import (
    DeadCode,
    InitializerInputs,
    LiftConstants,
    NoOps,
    UnshareBiases,
    UnshareWeights,
)
from roundel.passes.constant_folding import ConstantFolding
from roundel.passes.norms import FuseInstanceNorm, FuseL2Norm, FuseLayerNorm
from roundel.passes.operators import (
    ExplicitAttributes,
    NchwToNhwc,
    ReduceMeanToPool,
    SplitLargePools,
    SplitToSlice,
)
from roundel.passes.shapes import FixedShapes, refresh_shapes
from roundel.recipe.settings import Prepare

__all__ = ["STEPS", "Pass", "PassReport", "Step", "prepare", "refresh_shapes"]


@dataclass(frozen=True, slots=True)
class PassStep:
    """One line of the list: when a pass runs, and how it is made."""

    wanted: Callable[[Prepare], bool]
    make: Callable[[Prepare], Pass]


STEPS: tuple[PassStep, ...] = (
    PassStep(lambda o: True, lambda o: InitializerInputs()),
    PassStep(lambda o: bool(o.fixed_shapes), lambda o: FixedShapes(o.fixed_shapes)),
    PassStep(lambda o: True, lambda o: DeadCode()),  # a dead reader would keep a live value from being folded
    PassStep(lambda o: o.fold_constants, lambda o: LiftConstants()),
    PassStep(lambda o: True, lambda o: NoOps()),  # first without copies of weights behind Identity, then fold
    PassStep(lambda o: o.fold_constants, lambda o: ConstantFolding()),
    PassStep(lambda o: True, lambda o: NoOps()),  # folding shows that a Pad or a Reshape does nothing
    PassStep(lambda o: o.fuse_instance_norm, lambda o: FuseInstanceNorm()),  # the stricter match comes first
    PassStep(lambda o: o.fuse_layer_norm, lambda o: FuseLayerNorm()),
    PassStep(lambda o: o.fuse_gelu, lambda o: FuseGelu()),
    PassStep(lambda o: o.fuse_l2_norm, lambda o: FuseL2Norm()),
    PassStep(lambda o: o.fold_batch_norm, lambda o: FoldBatchNorm()),
    PassStep(lambda o: o.decompose_hard_swish, lambda o: DecomposeHardSwish()),
    PassStep(lambda o: o.fold_pad, lambda o: FoldPad()),
    PassStep(lambda o: o.unshare_biases, lambda o: UnshareBiases()),
    PassStep(lambda o: o.unshare_weights or o.scale_clip_bounds, lambda o: UnshareWeights()),
    PassStep(lambda o: o.reduce_mean_to_global_average_pool, lambda o: ReduceMeanToPool()),
    PassStep(lambda o: o.split_large_pools, lambda o: SplitLargePools()),  # also those just made from means
    PassStep(lambda o: o.split_to_slice, lambda o: SplitToSlice()),
    PassStep(
        lambda o: o.batch_norm_to_conv, lambda o: BatchNormToConv()
    ),  # only those that could not be folded
    PassStep(lambda o: o.nchw_to_nhwc, lambda o: NchwToNhwc()),
    PassStep(lambda o: o.explicit_conv_attributes, lambda o: ExplicitAttributes()),
    PassStep(
        lambda o: o.scale_clip_bounds, lambda o: ScaleClipBounds()
    ),  # needs layers with weights of their own
    PassStep(lambda o: True, lambda o: DeadCode()),
)


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
    for step in STEPS:
        if not step.wanted(options):
            continue
        action = step.make(options)
        started = time.perf_counter()
        if stale and action.reads_shapes:
            refresh_shapes(model)
            stale = False
        rewrites = action(model)
        stale = stale or rewrites > 0
        report = PassReport(action.name, rewrites, time.perf_counter() - started)
        reports.append(report)
        if notify is not None:
            notify(report)
    if stale:
        refresh_shapes(model)
    return tuple(reports)
