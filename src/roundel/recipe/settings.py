"""The recipe: everything that decides a quantization run, as one versioned, printable value.

Pydantic guards the edge (files, options): an unknown key is an error with a suggestion. Inside, the
frozen sections below are plain values; no room ever sees an options dictionary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from roundel.recipe.contradictions import contradictions
from roundel.types import (
    BlockScheme,
    BlockType,
    FloatScheme,
    FloatType,
    PackedScheme,
    QType,
    Range,
    ScaleKind,
    Scheme,
    Storage,
)

VERSION = 1

_Microscaling = Literal["mxfp8e5m2", "mxfp8e4m3", "mxfp6e3m2", "mxfp6e2m3", "mxfp4e2m1", "mxint8"]
_Block = Literal["bfp16", "mx4", "mx6", "mx9", _Microscaling]
ElementType = Literal["int8", "uint8", "int16", "uint16", "bfloat16", "float16", _Block]
ScaleName = Literal["float", "power_of_two", "int16"]
CalibrationMethod = Literal["minmax", "percentile", "entropy", "distribution", "layerwise_percentile", "mse"]
Number = bool | int | float
Percent = Annotated[float, Field(gt=50, le=100)]


class Section(BaseModel):
    """A frozen part of the recipe that knows no key but its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def inner_section(section: type[Section], name: str) -> type[Section] | None:
    """The section that a field holds, one or several of them; None for a field of plain values."""
    kind = section.model_fields[name].annotation
    found = (a for a in (kind, *get_args(kind)) if isinstance(a, type) and issubclass(a, Section))
    return next(found, None)


def storage_of(name: str, integer: Scheme, *, scaled: bool = False) -> Storage:
    """An element type as the rooms use it; `integer` gives what only integers have."""
    if name in {t.value for t in QType}:
        return replace(integer, qtype=QType(name))
    if name in {t.value for t in FloatType}:
        return FloatScheme(FloatType(name), scaled)
    return BlockScheme(BlockType(name))


class Activations(Section):
    """How tensors that flow through the graph are stored."""

    type: ElementType = "int8"
    """Element type."""
    symmetric: bool = True
    """Integers: zero point in the middle; otherwise the range decides it."""
    scale: ScaleName = "float"
    """Integers: which numbers a scale may be."""
    scaled: bool = False
    """Bfloat16, float16: divide by a calibrated scale that brings the range to +-2, or +-65504."""

    @property
    def integer(self) -> Scheme:
        """As an integer tensor that an override makes in a recipe of another type."""
        return Scheme(QType.INT8, self.symmetric, ScaleKind(self.scale))

    @property
    def scheme(self) -> Storage:
        """As the rooms use it."""
        return storage_of(self.type, self.integer, scaled=self.scaled)


class Weights(Section):
    """How constants are stored."""

    type: ElementType = "int8"
    """Element type."""
    symmetric: bool = True
    """Integers: zero point in the middle."""
    scale: ScaleName = "float"
    """Integers: which numbers a scale may be."""
    per_channel: bool = False
    """Integers: one scale for each output channel instead of one for the tensor."""
    reduce_range: bool = False
    """Integers: use one bit less, for CPUs whose 8-bit products saturate."""
    method: Literal["minmax", "mse"] = "minmax"
    """Integers: how a weight's range is chosen."""
    scaled: bool = False
    """Bfloat16, float16: divide by a scale that brings the largest weight to 2, or 65504."""

    @property
    def integer(self) -> Scheme:
        """As an integer weight, which an override may make in a recipe of another type."""
        return Scheme(QType.INT8, self.symmetric, ScaleKind(self.scale), reduce_range=self.reduce_range)

    @property
    def scheme(self) -> Storage:
        """As the rooms use it, before a channel or block axis is known."""
        return storage_of(self.type, self.integer, scaled=self.scaled)


class Bias(Section):
    """How the biases of Conv, ConvTranspose, Gemm and InstanceNormalization are stored."""

    type: Literal["int32", "int16", "int8", "weights", "float"] = "int32"
    """Int32: input scale x weight scale; int16 where that fits; int8: own scale; weights: as these."""


class Calibration(Section):
    """How ranges are chosen from the data."""

    method: CalibrationMethod = "minmax"
    """How a range follows from the data."""
    percentile: Percent = 99.999
    """Share of the values that the range holds (method percentile)."""
    candidates: tuple[Percent, ...] = (99.99, 99.999, 99.99999)
    """Percentiles to try (method layerwise_percentile)."""
    metric: Literal["mae", "mse"] = "mae"
    """Error that layerwise_percentile minimises."""
    scenario: Literal["same", "p3"] = "same"
    """Range from the values themselves or from their third power (method distribution)."""
    symmetric_range: bool = True
    """Percentile and entropy cut |x| (true) or each side by itself (false)."""
    mode: Literal["all", "most_common", "percentile"] = "all"
    """Mse with power-of-two scales: over all values, most common choice of the samples, without tails."""
    moving_average: Annotated[float, Field(gt=0, le=1)] | Literal["mean"] | None = None
    """Minmax: 'mean' of the samples' extremes, or the constant of an exponential average."""
    margin: Annotated[float, Field(ge=1, le=16)] = 1.0
    """Factor on the chosen ranges: room for values that the samples did not show; 16 bits can spare it."""


class Subgraph(Section):
    """All nodes on a path between two sets of tensors (or nodes)."""

    inputs: tuple[str, ...] = Field(min_length=1)
    outputs: tuple[str, ...] = Field(min_length=1)


class Selection(Section):
    """Which nodes are quantized. A selector is a name, a glob, 're:REGEX' or 'op:TYPE'."""

    op_types: tuple[str, ...] | None = None
    """Only these operator types."""
    extra_op_types: tuple[str, ...] = ()
    """Operator types beside those of the table."""
    all_op_types: bool = False
    """Every operator type of the model."""
    include: tuple[str, ...] = ()
    """Quantize only these nodes."""
    exclude: tuple[str, ...] = ()
    """Keep these nodes in float."""
    exclude_subgraphs: tuple[Subgraph, ...] = ()
    """Keep all nodes between these tensors in float."""


class Override(Section):
    """Another treatment for the tensors that one of the selectors matches."""

    tensors: tuple[str, ...] = ()
    """Tensor names, globs or 're:REGEX'."""
    nodes: tuple[str, ...] = ()
    """Node selectors: their inputs and outputs change."""
    type: ElementType | Literal["float"] | None = None
    """Element type, or 'float'."""
    symmetric: bool | None = None
    """Zero point in the middle."""
    per_channel: bool | None = None
    """Granularity of the weights."""
    range: tuple[float, float] | None = None
    """[low, high] instead of the observed range."""

    @model_validator(mode="after")
    def _useful(self) -> Override:
        if not self.tensors and not self.nodes:
            raise ValueError("an override needs 'tensors' or 'nodes'")
        if all(v is None for v in (self.type, self.symmetric, self.per_channel, self.range)):
            raise ValueError("an override needs 'type', 'symmetric', 'per_channel' or 'range'")
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError("'range' must be [low, high] with low < high")
        words = (self.symmetric, self.per_channel, self.range)
        integer = self.type in (None, *(t.value for t in QType))
        if not integer and words != (None, None, None):
            raise ValueError(f"'symmetric', 'per_channel' and 'range' do not apply to {self.type}")
        return self

    @property
    def fixed_range(self) -> Range | None:
        """The range as the plan uses it."""
        return None if self.range is None else Range(*self.range)


class Prepare(Section):
    """Float-to-float passes that run before planning."""

    fold_constants: bool = True
    """Compute what depends on constants only."""
    fold_batch_norm: bool = True
    """Into the Conv, ConvTranspose, Gemm or MatMul before it."""
    fuse_instance_norm: bool = True
    """Spelled-out instance normalization becomes one operator."""
    fuse_layer_norm: bool = True
    """Spelled-out layer normalization becomes one operator."""
    fuse_gelu: bool = True
    """Spelled-out Gelu becomes one operator (opset 20 and later)."""
    fuse_l2_norm: bool = True
    """Spelled-out L2 normalization becomes LpNormalization."""
    fold_pad: bool = True
    """Zero padding moves into the Conv behind it."""
    decompose_hard_swish: bool = True
    """HardSwish becomes x * HardSigmoid(x), which the table knows."""
    unshare_biases: bool = True
    """Each layer gets a bias of its own."""
    unshare_weights: bool = False
    """Each layer gets weights of its own."""
    scale_clip_bounds: bool = False
    """Rescale layers so that the bound of the Clip between them is the top of a power-of-two range."""
    explicit_conv_attributes: bool = True
    """Write out strides, pads, dilations, group and kernel_shape."""
    split_to_slice: bool = False
    """Split becomes Slice nodes."""
    batch_norm_to_conv: bool = False
    """A standalone BatchNormalization becomes a depthwise 1x1 Conv."""
    reduce_mean_to_global_average_pool: bool = False
    """A mean over height and width becomes GlobalAveragePool."""
    split_large_pools: bool = False
    """GlobalAveragePool over more than 512 positions becomes two pools."""
    nchw_to_nhwc: bool = False
    """The graph takes and gives NHWC images."""
    cut_head: bool = False
    """End at the last layers; what rearranges their results becomes NAME.tail.onnx, in float."""
    fixed_shapes: dict[str, tuple[int, ...]] = {}
    """Shape by input name, or size by the name of an open dimension."""
    fixed_inputs: dict[str, Number | tuple[Number, ...]] = {}
    """Inputs that become constants: a number, or all numbers of the tensor row by row, by input name."""


class Equalize(Section):
    """Cross-layer equalization: exact in float, kinder to one scale for a whole weight."""

    enabled: bool = True
    """Whether it runs (at effort fast and high)."""
    steps: Annotated[int, Field(ge=1, le=100)] = 20
    """Most rounds; it stops earlier when nothing changes any more."""
    threshold: Annotated[float, Field(ge=0)] = 1e-4
    """Relative change below which a round counts as no change."""
    append_bias: bool = True
    """Let a large bias count as part of its layer's range."""


class Finetune(Section):
    """Gradient-based fine-tuning of the rounding (AdaRound) or the weights (AdaQuant); needs torch."""

    algorithm: Literal["none", "adaround", "adaquant"] = "none"
    """Which one, at effort fast or high; none leaves it out at fast and means adaround at high."""
    iterations: Annotated[int, Field(ge=1)] = 1000
    """Steps for each layer."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """0.1 for AdaRound and 1e-5 for AdaQuant when not given."""
    batch_size: Annotated[int, Field(ge=1)] = 2
    """Samples in each step."""
    data_size: Annotated[int, Field(ge=1)] = 1000
    """Most samples."""
    seed: Annotated[int, Field(ge=0)] = 1705472343
    """The same seed gives the same model."""
    early_stop: bool = True
    """Stop a layer whose error on held-out samples is not on its way to less than it was."""
    target_op_types: tuple[str, ...] = (
        "Conv",
        "ConvTranspose",
        "Gemm",
        "MatMul",
        "InstanceNormalization",
        "LayerNormalization",
    )
    """Operators to tune."""
    update_bias: bool = True
    """AdaQuant: tune biases, too."""
    reg_param: Annotated[float, Field(ge=0)] = 0.01
    """AdaRound: weight of the rounding regulariser."""
    beta_range: tuple[float, float] = (20.0, 2.0)
    """AdaRound: first and last exponent of the regulariser, which takes the even numbers between."""
    warm_start: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """AdaRound: share of the steps without the regulariser."""
    optim_device: str = "cpu"
    """Where gradients are computed: cpu, cuda, cuda:N."""
    infer_device: str = "cpu"
    """Where the model runs: cpu or cuda."""


class Smooth(Section):
    """SmoothQuant: outliers of a layer's input move into its weights; exact in float, for transformers."""

    enabled: bool = False
    """Whether it runs, at any effort."""
    alpha: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = 0.5
    """Share of the difficulty that moves to the weights, or 'auto': the best of nine for each tensor."""
    insert: bool = False
    """Put a Mul before layers whose input has no norm or layer above that could take the factors."""


class Rotate(Section):
    """QuaRot R1: a Hadamard matrix spreads outliers of a transformer's residual stream; exact in float."""

    enabled: bool = False
    """Whether it runs, at any effort."""
    insert: bool = False
    """Put a MatMul where the stream begins or ends at something that cannot be rotated itself."""


class Improve(Section):
    """What `effort` fast and high do beyond calibration; each step is kept where a held-out error falls."""

    samples: Annotated[int, Field(ge=2)] = 80
    """Most samples that the steps below look at."""
    front_end: bool = True
    """Integers: leave in float what computes a spectrogram, up to the Log before the network."""
    detection_head: bool = True
    """Integers: leave in float what turns the last layers' results into boxes and scores."""
    delicate: bool = True
    """Integers: leave in float written-out variances and norms, and what is around Log, Exp or one number."""
    carriers: bool = True
    """Integers: leave in float what only moves values to nodes that stay in float."""
    goal: Annotated[float, Field(ge=0)] = 15.0
    """SQNR in dB that each output should reach; 16 bits for the few activations that spoil one. 0: off."""
    transformer_goal: Annotated[float, Field(ge=0)] = 30.0
    """The same for transformers: networks with layer norms and matrix products."""
    ranges: bool = True
    """Ranges of activations by the error behind the function that reads them, and at the outputs."""
    rounding: bool = True
    """Choose rounding, weight scales and biases layer by layer, on the quantized layers before."""
    activations: bool = True
    """XINT8: slopes with which HardSigmoid is nearer to Sigmoid, folded into the layers around."""
    equalize: Equalize = Equalize()
    rotate: Rotate = Rotate()
    smooth: Smooth = Smooth()
    finetune: Finetune = Finetune()


class Npu(Section):
    """Limits and arithmetic of the NPU's 8-bit engine; for power-of-two scales unless said otherwise."""

    adjust_shift_read: bool = False
    """Inputs of Add and Sub lie at most 7 positions apart."""
    adjust_shift_write: bool = False
    """Outputs of Add, Sub and Mul stay within reach of their inputs."""
    adjust_shift_cut: bool = False
    """Conv and Gemm drop 0 to 16 bits of their accumulator."""
    adjust_shift_bias: bool = False
    """Biases stay within reach of the accumulator."""
    adjust_hard_sigmoid: bool = False
    """HardSigmoid's input and output positions stay within its table."""
    adjust_shift_swish: bool = False
    """The product of a swish drops 0 to 15 bits."""
    leaky_relu: bool = False
    """Round the slope of LeakyRelu to n / 256."""
    sigmoid_to_hard_sigmoid: bool = False
    """Compute Sigmoid as HardSigmoid."""
    hard_sigmoid: bool = False
    """Multiply HardSigmoid by the gain of the NPU's 1/6."""
    average_pool: bool = False
    """Multiply average pools by the gain of the NPU's reciprocal."""
    reduce_mean: bool = False
    """Multiply ReduceMean by the gain of the NPU's reciprocal."""
    softmax: bool = False
    """Compute Softmax with the NPU's bfloat16 exponential."""
    instance_norm: bool = False
    """Compute InstanceNormalization in bfloat16 steps."""
    clip: bool = False
    """Round the bounds of Clip to whole numbers in -128..127."""
    clip_to_relu: bool = False
    """Write Relu for Clip to [0, m] where the quantizer saturates at or below m (any scale)."""
    halves_up: bool = False
    """Judge what is tried with halves rounded up, as Phoenix does. The file is the same kind either way."""

    @property
    def limits(self) -> bool:
        """Whether any position is adjusted."""
        return any(getattr(self, name) for name in type(self).model_fields if name.startswith("adjust_"))


class Placement(Section):
    """Where Q/DQ pairs go."""

    operators: Literal["standard", "extended", "matmul", "runtime"] = "extended"
    """The operator table; runtime is ONNX Runtime's own."""
    domain: Literal["auto", "ai.onnx", "com.microsoft"] = "auto"
    """Auto: ai.onnx for 8-bit types, com.microsoft for 16-bit ones below opset 21."""
    quantize_passthrough_inputs: bool = True
    """Reshape, Transpose, MaxPool … quantize their input even where nothing else does."""
    fold_relu: bool = False
    """Asymmetric activations: drop Relu and Clip whose bounds the quantizer enforces."""
    fuse_activations: bool = True
    """No Q/DQ between Conv, Gemm, Add, pools … and the Relu-like node behind them."""
    keep_pair_before: tuple[Literal["Relu", "LeakyRelu", "PRelu", "Clip"], ...] = ()
    """Relu-like operators that are not fused after all."""
    no_pair_between: tuple[tuple[str, str], ...] = ()
    """Further [maker, reader] operators without a Q/DQ between, for example [Mul, Add]."""
    align_concat: bool = False
    """The inputs of Concat take its output's scale."""
    align_pool: bool = False
    """Average pools keep their input's scale."""
    align_slice: bool = False
    """Slice keeps its input's scale."""
    align_pad: bool = False
    """Pad's input takes its output's scale."""
    constants_as_activations: bool = False
    """Constant operands of Add, Mul, Sub, Div, Min, Max take the activation type."""
    matmul_const_only: bool = False
    """Leave MatMul of two computed tensors in float."""
    weights_only: bool = False
    """Leave activations and biases in float."""
    dedicated_pairs: bool = False
    """One Q/DQ pair for each reader of a tensor."""
    dedicated_dequantizers: bool = False
    """One DQ node for each reader, behind a shared Q."""
    skip_output_op_types: tuple[str, ...] = ()
    """Operators whose outputs stay float."""


class Mixed(Section):
    """A second element type for what the heavy operators read: inputs, weights and biases."""

    type: ElementType | None = None
    """Element type; none: nothing is mixed."""
    weights: ElementType | None = None
    """Element type of their weights; as `type` when not given."""
    op_types: tuple[str, ...] = ("Conv", "ConvTranspose", "Gemm", "MatMul")
    """Operators that read it; their outputs keep the recipe's own type."""
    include: tuple[str, ...] = ()
    """Only these nodes of them: names, globs, 're:REGEX' or 'op:TYPE'."""
    exclude: tuple[str, ...] = ()
    """All but these, likewise."""
    threshold: float | None = None
    """Mix layer by layer, the kindest first, up to this error (dB for sqnr, psnr); none: all at once."""
    goal: Literal["speed", "quality"] = "speed"
    """With a threshold: speed mixes as long as the error stays within, quality until it does."""
    metric: Literal["l2", "kl", "cosine", "sqnr", "psnr"] = "l2"
    """With a threshold: the error of an output: l2, kl and cosine distance, sqnr and psnr in dB."""
    output: Annotated[int, Field(ge=0)] = 0
    """With a threshold: the number of the output that counts."""

    @property
    def searched(self) -> bool:
        """Whether data decides which layers are mixed."""
        return self.type is not None and self.threshold is not None


class Blocks(Section):
    """How the block formats (bfp16, mx4 to mx9, mxfp*, mxint8) cut and round a tensor."""

    rounding: Literal["half_even", "half_away", "half_up"] = "half_even"
    """Where a value in the middle goes; the mxfp formats always round half to even."""
    block_size: Annotated[int, Field(ge=2, le=1024)] | None = None
    """Neighbours that share an exponent: 8 (bfp16), 16 (mx4 to mx9), 32 (mxfp*, mxint8) if not given."""
    axis: int = 1
    """Along which blocks lie, where no operator says otherwise; the channels of an image."""
    refine_axis: bool = True
    """Blocks of MatMul and Gemm lie along the axis that is summed over, those of Softmax along its own."""
    bit_width: Annotated[int, Field(ge=10, le=32)] | None = None
    """Bfp16 and mx4 to mx9: bits of the shared exponent (8) and of one value; the type's own if not given."""
    sub_block_size: Annotated[int, Field(ge=1, le=1024)] = 2
    """Mx4, mx6, mx9: neighbours that share a shift."""
    sub_block_shift_bits: Annotated[int, Field(ge=0, le=8)] = 1
    """Mx4, mx6, mx9: bits of a shift."""
    compiler: bool = False
    """Bfp16: raise a block's exponent where its largest value would round past it, as AMD's compiler does."""
    bfloat16_first: bool = False
    """Bfp16 and mx4 to mx9: round to bfloat16 before anything else."""


class Floats(Section):
    """How bfloat16 and float16 tensors are written."""

    form: Literal["pair", "cast", "plain"] = "pair"
    """AMD's operators; casts there and back; or rounded constants only, for a compiler that does the rest."""
    clip: bool = False
    """Clip activations to the type's finite range before they are rounded."""


class WeightOnly(Section):
    """Mode weight_only: the weights of MatMul and Gemm in few bits, everything else in float."""

    bits: Literal[2, 4, 8] = 4
    """Of one weight."""
    group_size: Literal[16, 32, 64, 128, 256] = 128
    """Neighbouring inputs of an output that share a scale."""
    symmetric: bool = True
    """The middle code stands for zero; otherwise each group has a zero point, too."""
    range: Literal["minmax", "mse"] = "mse"
    """A group's range holds its extremes, or gives the least squared error."""
    algorithm: Literal["round", "gptq"] = "round"
    """Round to nearest, which needs no data, or let later weights make up for the errors of earlier ones."""
    percdamp: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Gptq: share of the inputs' mean power that is added to each input's, against overfitting."""
    act_order: bool = True
    """Gptq: begin with the inputs of the most power instead of the first."""
    format: Literal["matmul_nbits", "qdq"] = "matmul_nbits"
    """One com.microsoft operator, or DequantizeLinear with blocks (opset 21) before MatMul and Gemm."""
    accuracy_level: Literal[0, 1, 2, 3, 4] = 0
    """MatMulNBits may compute in: 0 and 1 float32, 2 float16, 3 bfloat16, 4 int8."""

    @property
    def scheme(self) -> PackedScheme:
        """As the rooms use it; MatMulNBits takes negative scales, other readers of Q/DQ nodes may not."""
        mirrored = self.symmetric and self.format == "matmul_nbits"
        return PackedScheme(self.bits, self.group_size, self.symmetric, mirrored)


Pixels = Annotated[int, Field(ge=1)]


class Data(Section):
    """How files become samples; recorded so that a run can be repeated."""

    samples: Pixels | None = None
    """Use at most this many samples."""
    mean: tuple[float, ...] | None = None
    """Subtracted, in units of the scaled image."""
    std: tuple[float, ...] | None = None
    """Divides, likewise."""
    scale: Literal["unit", "raw"] | None = None
    """Unit: pixels / 255; raw: 0..255."""
    resize: Pixels | tuple[Pixels, Pixels] | None = None
    """Short side, or [height, width]."""
    crop: Pixels | tuple[Pixels, Pixels] | None = None
    """Side, or [height, width]."""
    layout: Literal["nchw", "nhwc"] | None = None
    """Axis order of the model input; read from its shape when not given."""
    bgr: bool = False
    """Blue first."""
    letterbox: bool = False
    """Keep the aspect: the whole image in the middle of the model's (or resize's) size, grey 114 around."""
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"
    """Of the resize."""


class Output(Section):
    """The file."""

    external_data: bool = False
    """Weights in a file of their own beside the model."""
    opset: Literal[17, 18, 19, 20, 21] | None = None
    """Raise the opset; 21 has native 16-bit Q/DQ."""
    half_weights: bool = False
    """Store bfloat16 and float16 constants in 16 bits instead of 32: exact, and half the size."""
    strip_functions: bool = False
    """Leave out the bodies of AMD's operators: for tools that bring their own; ONNX Runtime alone cannot."""


class Verify(Section):
    """What is checked before the file appears."""

    samples: Annotated[int, Field(ge=0, le=1_000_000)] = 16
    """Samples run through both models."""


class Recipe(Section):
    """A whole run. See `roundel presets` for the ones that ship, and docs/recipes.md for each field."""

    version: Literal[1] = 1
    """Of the file format."""
    name: str = "custom"
    """Of the preset or recipe."""
    title: str = ""
    """One line for people."""
    mode: Literal["static", "dynamic", "weight_only"] = "static"
    """Static: calibrated; dynamic: activations are measured at run time; weight_only: they stay float."""
    effort: Literal["none", "fast", "high"] = "none"
    """None: calibration only; fast: equalization, rounding, bias correction; high: also fine-tuning."""
    activations: Activations = Activations()
    weights: Weights = Weights()
    bias: Bias = Bias()
    calibration: Calibration = Calibration()
    selection: Selection = Selection()
    overrides: tuple[Override, ...] = ()
    """Treatment of single tensors."""
    data: Data = Data()
    prepare: Prepare = Prepare()
    placement: Placement = Placement()
    mixed: Mixed = Mixed()
    blocks: Blocks = Blocks()
    floats: Floats = Floats()
    weight_only: WeightOnly = WeightOnly()
    npu: Npu = Npu()
    output: Output = Output()
    improve: Improve = Improve()
    verify: Verify = Verify()

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        """What cannot be carried out, or would have no effect, is refused here, before any work is done."""
        for contradiction in contradictions(self):
            raise ValueError(contradiction)
        return self

    @property
    def finetuning(self) -> Literal["none", "adaround", "adaquant"]:
        """The algorithm that tunes; effort high means AdaRound, or AdaQuant for weights without codes."""
        if self.mode != "static":
            return "none"
        named = self.improve.finetune.algorithm
        if named != "none" or self.effort != "high":
            return named
        return "adaround" if isinstance(self.weights.scheme, Scheme) else "adaquant"

    @property
    def keeps_float_parts(self) -> bool:
        """Whether parts stay in float for their place in the model: see `plan/float_parts.py`."""
        return self.mode == "static" and self.effort != "none" and isinstance(self.activations.scheme, Scheme)

    @property
    def errors_behind_reader(self) -> bool:
        """Whether the least squared error of a range is that behind the function which reads the tensor."""
        return self.effort != "none" and self.improve.ranges

    @property
    def wanted_opset(self) -> int | None:
        """The opset to raise the model to: the recipe's own, or the first that has what is to be written."""
        blocked = self.mode == "weight_only" and self.weight_only.format == "qdq"
        return 21 if blocked else self.output.opset

    @property
    def own(self) -> dict[str, Any]:
        """What was set on top of a preset, by section: a device or an effort changes none of it."""
        return self.model_dump(exclude_unset=True)

    def merged(self, changes: dict[str, Any]) -> Recipe:
        """A copy with nested changes applied and validated."""
        return Recipe.composed(self.model_dump(), merge(self.own, changes))

    @staticmethod
    def composed(base: Mapping[str, Any], own: Mapping[str, Any]) -> Recipe:
        """A validated recipe from a preset's values and those set on top of them."""
        recipe = Recipe.model_validate(merge(base, own))
        _keep_set(recipe, own)
        return recipe


def _keep_set(section: Section, own: Mapping[str, Any]) -> None:
    """Of the fields that validation found set, leave those that are not a preset's."""
    for name in section.model_fields_set:
        part, given = getattr(section, name), own.get(name, {})
        if isinstance(part, Section) and isinstance(given, Mapping):
            _keep_set(part, given)
    section.model_fields_set.intersection_update(own)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge of mappings; everything else is replaced."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        # fixed_shapes is itself data, yet merging it entry by entry is what a reader expects, too.
        result[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result
