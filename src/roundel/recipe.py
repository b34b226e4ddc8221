"""The recipe: everything that decides a quantization run, as one versioned, printable value.

Pydantic guards the edge (files, options): an unknown key is an error with a suggestion. Inside, the
frozen sections below are plain values; no room ever sees an options dictionary.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from roundel.types import QType, Range, ScaleKind, Scheme

VERSION = 1

ActivationType = Literal["int8", "uint8", "int16", "uint16"]
WeightType = Literal["int8", "uint8", "int16", "uint16"]
ScaleName = Literal["float", "power_of_two", "int16"]
CalibrationMethod = Literal["minmax", "percentile", "entropy", "distribution", "layerwise_percentile", "mse"]
Percent = Annotated[float, Field(gt=50, le=100)]


class Section(BaseModel):
    """A frozen part of the recipe that knows no key but its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Activations(Section):
    """How tensors that flow through the graph are stored."""

    type: ActivationType = "int8"
    symmetric: bool = True
    scale: ScaleName = "float"

    @property
    def scheme(self) -> Scheme:
        """As the rooms use it."""
        return Scheme(QType(self.type), self.symmetric, ScaleKind(self.scale))


class Weights(Section):
    """How constants are stored."""

    type: WeightType = "int8"
    symmetric: bool = True
    scale: ScaleName = "float"
    per_channel: bool = False
    reduce_range: bool = False
    method: Literal["minmax", "mse"] = "minmax"

    @property
    def scheme(self) -> Scheme:
        """As the rooms use it, before a channel axis is known."""
        kind = ScaleKind(self.scale)
        return Scheme(QType(self.type), self.symmetric, kind, reduce_range=self.reduce_range)


class Bias(Section):
    """How the biases of Conv, ConvTranspose, Gemm and InstanceNormalization are stored."""

    type: Literal["int32", "int16", "float"] = "int32"


class Calibration(Section):
    """How ranges are chosen from the data."""

    method: CalibrationMethod = "minmax"
    percentile: Percent = 99.999
    candidates: tuple[Percent, ...] = (99.99, 99.999, 99.99999)
    metric: Literal["mae", "mse"] = "mae"
    scenario: Literal["same", "p3"] = "same"
    symmetric_range: bool = Field(
        True, description="percentile and entropy cut |x| (true) or each side by itself (false)"
    )
    moving_average: Annotated[float, Field(gt=0, le=1)] | Literal["mean"] | None = None


class Subgraph(Section):
    """All nodes on a path between two sets of tensors (or nodes)."""

    inputs: tuple[str, ...] = Field(min_length=1)
    outputs: tuple[str, ...] = Field(min_length=1)


class Selection(Section):
    """Which nodes are quantized. A selector is a name, a glob, 're:REGEX' or 'op:TYPE'."""

    op_types: tuple[str, ...] | None = Field(None, description="only these operator types")
    extra_op_types: tuple[str, ...] = ()
    all_op_types: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    exclude_subgraphs: tuple[Subgraph, ...] = ()


class Override(Section):
    """Another treatment for the tensors that one of the selectors matches."""

    tensors: tuple[str, ...] = Field((), description="tensor names, globs or 're:REGEX'")
    nodes: tuple[str, ...] = Field((), description="node selectors: their inputs and outputs change")
    type: ActivationType | Literal["float"] | None = None
    symmetric: bool | None = None
    per_channel: bool | None = None
    range: tuple[float, float] | None = None

    @model_validator(mode="after")
    def _useful(self) -> Override:
        if not self.tensors and not self.nodes:
            raise ValueError("an override needs 'tensors' or 'nodes'")
        if all(v is None for v in (self.type, self.symmetric, self.per_channel, self.range)):
            raise ValueError("an override needs 'type', 'symmetric', 'per_channel' or 'range'")
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError("'range' must be [low, high] with low < high")
        return self

    @property
    def fixed_range(self) -> Range | None:
        """The range as the plan uses it."""
        return None if self.range is None else Range(*self.range)


class Prepare(Section):
    """Float-to-float passes that run before planning."""

    fold_constants: bool = True
    fold_batch_norm: bool = True
    fuse_instance_norm: bool = True
    fuse_layer_norm: bool = True
    fuse_gelu: bool = True
    fuse_l2_norm: bool = True
    fold_pad: bool = True
    decompose_hard_swish: bool = True
    unshare_biases: bool = True
    explicit_conv_attributes: bool = True
    split_to_slice: bool = False
    batch_norm_to_conv: bool = False
    reduce_mean_to_global_average_pool: bool = False
    split_large_pools: bool = False
    nchw_to_nhwc: bool = False
    fixed_shapes: dict[str, tuple[int, ...]] = {}


class Placement(Section):
    """Where Q/DQ pairs go."""

    operators: Literal["standard", "extended", "matmul"] = "extended"
    domain: Literal["auto", "ai.onnx", "com.microsoft"] = Field(
        "auto", description="auto: ai.onnx for 8-bit types, com.microsoft for 16-bit ones below opset 21"
    )
    quantize_passthrough_inputs: bool = Field(
        True, description="Reshape, Transpose, MaxPool … quantize their input even where nothing else does"
    )
    fold_relu: bool = Field(
        False, description="asymmetric activations: drop Relu and Clip whose bounds the quantizer enforces"
    )
    fuse_activations: bool = Field(
        True, description="no Q/DQ between Conv, Gemm, Add, pools … and the Relu-like node behind them"
    )
    align_concat: bool = False
    align_pool: bool = False
    align_slice: bool = False
    align_pad: bool = False
    align_transpose: bool = False
    align_reshape: bool = False
    constants_as_activations: bool = Field(
        False, description="constant operands of Add, Mul, Sub, Div, Min, Max take the activation type"
    )
    matmul_const_only: bool = Field(False, description="leave MatMul of two computed tensors in float")
    weights_only: bool = False
    dedicated_pairs: bool = Field(False, description="one Q/DQ pair for each reader of a tensor")
    skip_output_op_types: tuple[str, ...] = Field((), description="operators whose outputs stay float")


Pixels = Annotated[int, Field(ge=1)]


class Data(Section):
    """How files become samples; recorded so that a run can be repeated."""

    samples: Pixels | None = Field(None, description="use at most this many samples")
    mean: tuple[float, ...] | None = Field(None, description="subtracted, in units of the scaled image")
    std: tuple[float, ...] | None = None
    scale: Literal["unit", "raw"] | None = Field(None, description="unit: pixels / 255; raw: 0..255")
    resize: Pixels | tuple[Pixels, Pixels] | None = Field(None, description="short side, or [height, width]")
    crop: Pixels | tuple[Pixels, Pixels] | None = Field(None, description="side, or [height, width]")
    layout: Literal["nchw", "nhwc"] | None = None
    bgr: bool = False
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"


class Output(Section):
    """The file."""

    external_data: bool = False
    opset: Literal[17, 21] | None = Field(None, description="raise the opset; 21 has native 16-bit Q/DQ")


class Verify(Section):
    """What is checked before the file appears."""

    samples: Annotated[int, Field(ge=0)] = Field(16, description="samples run through both models")


class Recipe(Section):
    """A whole run. See `roundel presets` for the ones that ship, and docs/recipes.md for each field."""

    version: Literal[1] = 1
    name: str = "custom"
    title: str = ""
    mode: Literal["static", "dynamic"] = "static"
    activations: Activations = Activations()
    weights: Weights = Weights()
    bias: Bias = Bias()
    calibration: Calibration = Calibration()
    selection: Selection = Selection()
    overrides: tuple[Override, ...] = ()
    data: Data = Data()
    prepare: Prepare = Prepare()
    placement: Placement = Placement()
    output: Output = Output()
    verify: Verify = Verify()

    def merged(self, changes: dict[str, Any]) -> Recipe:
        """A copy with nested changes applied and validated."""
        return Recipe.model_validate(merge(self.model_dump(), changes))


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Deep merge of mappings; everything else is replaced."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        # fixed_shapes is itself data, yet merging it entry by entry is what a reader expects, too.
        result[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result
