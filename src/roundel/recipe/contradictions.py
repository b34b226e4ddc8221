"""Settings that contradict the element types: an option without effect is refused, not ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from roundel.types import BlockType, FloatScheme, QType, Scheme, needs_range

if TYPE_CHECKING:
    from roundel.recipe.settings import Recipe

_INTEGERS = frozenset(t.value for t in QType)
_BLOCKS = frozenset(t.value for t in BlockType)
_MICRO_EXPONENTS = frozenset({"mx4", "mx6", "mx9"})
_RANGE_METHODS = frozenset({"minmax", "percentile", "entropy", "distribution"})
_ACTIVATION_WORDS = ("symmetric", "scale")
_WEIGHT_WORDS = ("symmetric", "scale", "per_channel", "reduce_range", "method")


def contradictions(recipe: Recipe) -> Iterator[str]:
    """One sentence for each setting that the recipe's types leave without effect or without sense."""
    parts = (_integer_words, _float_words, _mixed, _block_words, _biases, _calibration, _steps, _weight_only)
    for part in parts:
        yield from part(recipe)
    if recipe.effort == "none" and recipe.improve.finetune.algorithm != "none":
        yield "fine-tuning (improve.finetune.algorithm) needs effort fast or high"
    if recipe.npu.limits:
        needs = (need for need, met in _shift_needs(recipe).items() if not met)
        yield from (f"the NPU's shift limits (npu.adjust_*) need {need}" for need in needs)


def _shift_needs(recipe: Recipe) -> dict[str, bool]:
    """What shift limits are defined for, and whether the recipe has it."""
    moving, stored = recipe.activations, recipe.weights
    return {
        "weights.scale and activations.scale power_of_two": stored.scale == moving.scale == "power_of_two",
        "weights.per_channel false": not stored.per_channel,
        "weights.reduce_range false": not stored.reduce_range,
        "weights.type int8": stored.type == "int8",
        "weights.symmetric and activations.symmetric true": stored.symmetric and moving.symmetric,
        "activations.type int8 or uint8": moving.type in ("int8", "uint8"),
    }


def _override_types(recipe: Recipe) -> set[str]:
    """Types that some tensors have beside the recipe's own."""
    given = (recipe.mixed.type, recipe.mixed.weights, *(override.type for override in recipe.overrides))
    return {str(word) for word in given if word is not None}


def _types(recipe: Recipe) -> set[str]:
    """All that some tensor may have."""
    return {recipe.activations.type, recipe.weights.type, *_override_types(recipe)}


def _mixed(recipe: Recipe) -> Iterator[str]:
    mixed = recipe.mixed
    for name in _changed(mixed, tuple(type(mixed).model_fields)) if mixed.type is None else ():
        yield f"mixed.{name} means mixed.type, which is not given"
    for name in _changed(mixed, ("goal", "metric", "output")) if mixed.threshold is None else ():
        yield f"mixed.{name} means mixed.threshold, which is not given"
    if mixed.type is not None and recipe.mode != "static":
        yield f"mixed.type means mode static, and the mode is {recipe.mode}"
    short = next((t for t in (mixed.type, mixed.weights) if t is not None and t not in _INTEGERS), None)
    if short is not None and recipe.bias.type in ("int32", "int16"):
        yield f"bias.type {recipe.bias.type} needs integers, and mixed.type is {short}: use weights"


def _integer_words(recipe: Recipe) -> Iterator[str]:
    """What only integers have: zero points, channels, shared scales, saturation."""
    overridden = bool(_override_types(recipe) & _INTEGERS)
    moving, stored = recipe.activations, recipe.weights
    if recipe.mode == "dynamic" and not {moving.type, stored.type} <= _INTEGERS:
        yield f"mode dynamic needs integers, not {moving.type} and {stored.type}"
    words = ("activations", moving, _ACTIVATION_WORDS), ("weights", stored, _WEIGHT_WORDS)
    for where, section, names in words if not overridden else ():
        for name in _changed(section, names) if section.type not in _INTEGERS else ():
            yield f"{where}.{name} means integers, and {where}.type is {section.type}"
    if moving.type in _INTEGERS or overridden:
        return
    if stored.type not in _INTEGERS and recipe.placement.domain != "auto":
        yield "placement.domain is of integer Q/DQ nodes, and this recipe has none"
    if recipe.placement.fold_relu or recipe.npu.clip_to_relu:
        yield f"placement.fold_relu and npu.clip_to_relu need saturation, which {moving.type} does not have"
    if not needs_range(moving.scheme):
        for name in ("align_concat", "align_pool", "align_slice", "align_pad"):
            if getattr(recipe.placement, name):
                yield f"placement.{name} aligns scales, and {moving.type} has none here"


def _changed(section: object, names: tuple[str, ...]) -> Iterator[str]:
    defaults = type(section)()
    yield from (name for name in names if getattr(section, name) != getattr(defaults, name))


def _float_words(recipe: Recipe) -> Iterator[str]:
    """What only bfloat16 and float16 have."""
    for where, section in (("activations", recipe.activations), ("weights", recipe.weights)):
        if section.scaled and not isinstance(section.scheme, FloatScheme):
            yield f"{where}.scaled means bfloat16 and float16, and {where}.type is {section.type}"
    more = recipe.activations.scaled or recipe.weights.scaled or recipe.floats.clip
    if recipe.floats.form == "plain" and more:
        yield "floats.form plain leaves no place for a scale or a clip; use pair or cast"
    types = _types(recipe)
    floats, blocks = types & {"bfloat16", "float16"}, types & _BLOCKS
    if recipe.output.strip_functions and not (blocks or (floats and recipe.floats.form == "pair")):
        yield "output.strip_functions means AMD's operators, and this recipe writes none"
    if floats:
        return
    if recipe.floats != type(recipe.floats)():
        yield "the section 'floats' means bfloat16 and float16, which this recipe does not use"
    if recipe.output.half_weights:
        yield "output.half_weights needs bfloat16 or float16 weights"


def _block_words(recipe: Recipe) -> Iterator[str]:
    """What only some of the block formats have."""
    options = recipe.blocks
    types = _types(recipe) & _BLOCKS
    if not types:
        if options != type(options)():
            yield "the section 'blocks' means block formats, which this recipe does not use"
        return
    owners = {
        "rounding": {"mxint8", "bfp16", *_MICRO_EXPONENTS},
        "bit_width": {"bfp16", *_MICRO_EXPONENTS},
        "bfloat16_first": {"bfp16", *_MICRO_EXPONENTS},
        "sub_block_size": _MICRO_EXPONENTS,
        "sub_block_shift_bits": _MICRO_EXPONENTS,
        "compiler": {"bfp16"},
    }
    for name in _changed(options, tuple(owners)):
        if not types & owners[name]:
            yield f"blocks.{name} means {', '.join(sorted(owners[name]))}, which this recipe does not use"
    if types & _MICRO_EXPONENTS and (options.block_size or 16) % options.sub_block_size:
        yield "blocks.sub_block_size must divide the block size"


def _biases(recipe: Recipe) -> Iterator[str]:
    integers = recipe.activations.type in _INTEGERS and recipe.weights.type in _INTEGERS
    if recipe.bias.type in ("int32", "int16") and not integers:
        yield f"bias.type {recipe.bias.type} needs integer activations and weights; use weights or float"
    if recipe.bias.type == "int8" and recipe.weights.type not in _INTEGERS:
        yield f"bias.type int8 needs integer weights, and weights.type is {recipe.weights.type}"


def _calibration(recipe: Recipe) -> Iterator[str]:
    scheme, calibration = recipe.activations.scheme, recipe.calibration
    if isinstance(scheme, Scheme) or _override_types(recipe) & _INTEGERS:
        return
    if not needs_range(scheme) and calibration != type(calibration)():
        yield f"calibration has nothing to do: {recipe.activations.type} needs no range"
    if needs_range(scheme) and calibration.method not in _RANGE_METHODS:
        yield f"calibration.method {calibration.method} searches integer codes; use minmax or percentile"


def _steps(recipe: Recipe) -> Iterator[str]:
    """The improving steps that work on integer codes."""
    moving, stored = recipe.activations, recipe.weights
    whole = moving.type in _INTEGERS, stored.type in _INTEGERS
    for name in ("front_end", "detection_head", "delicate", "carriers"):
        if not whole[0] and not getattr(recipe.improve, name):
            yield f"improve.{name} is about integers, and activations are {moving.type}"
    if recipe.effort == "none" or all(whole):
        return
    if recipe.improve.rounding:
        types = f"{moving.type} activations and {stored.type} weights"
        yield f"improve.rounding works on integers, not on {types}: set it to false"
    if recipe.improve.ranges and not whole[0]:
        yield f"improve.ranges works on integers, not on {moving.type} activations: set it to false"
    if whole[1]:
        return
    if recipe.improve.finetune.algorithm == "adaround":
        yield f"AdaRound rounds integer codes, and weights.type is {stored.type}; use adaquant"


def _weight_only(recipe: Recipe) -> Iterator[str]:
    options = recipe.weight_only
    if recipe.mode != "weight_only":
        if options != type(options)():
            yield f"the section 'weight_only' means mode weight_only, and the mode is {recipe.mode}"
        return
    if recipe.effort != "none":
        yield "effort belongs to mode static; weight_only.algorithm says what is done to the weights"
    if recipe.overrides:
        yield "overrides change Q/DQ pairs, which mode weight_only does not write; use selection.exclude"
    for name in _changed(options, ("act_order", "percdamp")) if options.algorithm != "gptq" else ():
        yield f"weight_only.{name} belongs to gptq, and weight_only.algorithm is {options.algorithm}"
    if options.format == "qdq" and options.accuracy_level:
        yield "weight_only.accuracy_level is a setting of MatMulNBits, and weight_only.format is qdq"
    if options.format == "qdq" and recipe.output.opset not in (None, 21):
        opset = f"output.opset is {recipe.output.opset}"
        yield f"weight_only.format qdq needs blocks in DequantizeLinear, and {opset}: use 21"
    if options.format == "qdq" and options.bits == 2:
        yield "weight_only.format qdq has 4 and 8 bits; 2 bits need matmul_nbits"
