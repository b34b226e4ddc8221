"""What a config of either API means: a recipe, settings of the run, and notes for its reader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from roundel.errors import did_you_mean
from roundel.model.load import ModelSource, load_model
from roundel.quark import options
from roundel.quark.algorithms import ALGORITHMS
from roundel.quark.config import Config, QuantizationConfig
from roundel.quark.errors import QuarkConfigError, go_on
from roundel.quark.qconfig import QConfig, lowered, with_algorithms
from roundel.quark.request import ALIGNED, FIELD_OPTIONS, Request, base_values, counts, normalised
from roundel.quark.rows import Effect, Option
from roundel.quark.selection import known_overrides, selected
from roundel.quark.specs import AlgoConfig
from roundel.recipe.load import unfolded, validate
from roundel.recipe.settings import Recipe, merge

# Every extra option, one row each. The order of the rows is the order in which they take effect.
GROUPS: Mapping[str, tuple[Option, ...]] = {
    "Preference": options.PREFERENCE,
    "Graph before quantization": options.GRAPH,
    "What is quantized": options.TARGETS,
    "Q/DQ pairs": options.BETWEEN,
    "Calibration": options.CALIBRATION,
    "Types, scales and biases": options.NUMERIC,
    "The NPU's arithmetic and limits": options.ENGINE,
    "Algorithms": ALGORITHMS,
    "The run": options.RUN,
}
OPTIONS: Mapping[str, Option] = {row.key: row for rows in GROUPS.values() for row in rows}


def _effects(request: Request) -> Iterator[tuple[str, Effect]]:
    """What each of the request's options does, in table order."""
    for key in request.options:
        if key not in OPTIONS:
            go_on(
                QuarkConfigError(
                    f"There is no extra option '{key}': it does nothing.",
                    where="extra_options",
                    hint=did_you_mean(str(key), (*OPTIONS, *FIELD_OPTIONS)) or "See docs/quark-options.md.",
                )
            )
    for key, row in OPTIONS.items():
        if key in request.options:
            yield key, row.effect(request.options[key], request)


_INTEGER_ACTIVATIONS = (
    *("activations.symmetric", "activations.scale"),
    *("placement.fold_relu", "npu.clip_to_relu"),
    *(f"placement.{name}" for name in ALIGNED),
)
_INTEGER_WEIGHTS = tuple(f"weights.{word}" for word in ("symmetric", "scale", "method", "per_channel"))
_FLOATS = ("floats.form", "floats.clip", "weights.scaled", "activations.scaled")


def _meaningless(request: Request, values: Mapping[str, Any]) -> Iterator[str]:
    """Recipe values that the types leave without effect."""
    if not request.integer_activations:
        yield from _INTEGER_ACTIVATIONS
        if not values.get("activations.scaled"):
            yield from [path for path in values if path.startswith("calibration.")]
    if not request.integer_weights:
        yield from _INTEGER_WEIGHTS
    if not request.short_floats:
        yield from _FLOATS
    if not request.blocks:
        yield from [path for path in values if path.startswith("blocks.")]


AnyConfig = Config | QConfig | QuantizationConfig


@dataclass(frozen=True, slots=True)
class Translation:
    """What a config means.

    Attributes:
        config: in the classic API's words, every setting in one place.
        recipe: everything that decides the model.
        run: everything else that the config says about the run, by name.
        notes: what its reader should know.
    """

    config: QuantizationConfig
    recipe: Recipe
    run: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def operators(self) -> bool:
        """Whether QLinear operators are to take the place of Q/DQ pairs."""
        return getattr(self.config.quant_format, "name", "") == "QOperator"

    def without_data(self) -> Translation:
        """The same for a run without samples, where the format needs none."""
        if self.recipe.effort == "none":
            return self
        told = "no calibration data: nothing is learned from any, and biases stay as they are"
        return replace(self, recipe=self.recipe.merged({"effort": "none"}), notes=(*self.notes, told))


def _gptq_beside_convolutions(
    config: QuantizationConfig, model: ModelSource | None
) -> tuple[QuantizationConfig, tuple[str, ...]]:
    """GPTQ is for matrices; where a model has convolutions, all weights are stored in 8 bits, as in Quark."""
    options = config.extra_options
    if model is None or not options.get("UseGPTQ") or options.get("UseMatMulNBits"):
        return config, ()
    usual = {"Bits": 8, "GroupSize": -1}
    asked = options.get("GPTQParams") or {}
    if any(asked.get(key, value) != value for key, value in usual.items()):
        return config, ()
    if not any(node.op_type in ("Conv", "ConvTranspose") for node in load_model(model).model.graph):
        return config, ()
    kept = {key: value for key, value in options.items() if key not in ("UseGPTQ", "GPTQParams")}
    told = "UseGPTQ: beside convolutions, all weights are stored in 8 bits, each tensor in the range of least"
    told += " error; GroupSize and Bits in GPTQParams choose GPTQ in groups for MatMul and Gemm alone"
    return replace(config, extra_options={**kept, "WeightsOnly": True}), (told,)


def translate(
    config: AnyConfig, model: ModelSource | None = None, algorithms: Iterable[AlgoConfig] = ()
) -> Translation:
    """The recipe that a config of either API stands for. The config is read, never changed.

    Args:
        config: classic or newer.
        model: the float model; needed where the config names nodes.
        algorithms: further algorithms, as `quantize_model` takes them.

    Raises:
        QuarkConfigError: the config contradicts itself, or asks for what Roundel does not do.
    """
    classic = with_algorithms(lowered(config), list(algorithms))
    classic, said = _gptq_beside_convolutions(classic, model)
    request = Request(normalised(classic))
    _refuse_flags(request.config)
    values, notes = dict(base_values(request)), [*said, *_flag_notes(request)]
    run = _apply_options(request, values, notes)
    own = values.pop("overrides", ())
    recipe = _recipe(values, run)
    if model is not None:
        layers = config if isinstance(config, QConfig) else None
        chosen, found = selected(request, layers, run.get("float_outputs_of", ()), recipe, model)
        _collect(values, chosen)
        notes += found
        own = known_overrides(own, recipe, model) if own else ()
    # What is said of single tensors wins over what is said of layers.
    _collect(values, {"overrides": own} if own else {})
    recipe = _recipe(values, run)
    return Translation(request.config, recipe, run, tuple(notes))


def _apply_options(request: Request, values: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Let every option have its say; returns what they say about the run."""
    run: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key, effect in _effects(request):
        if not all(counts(path, request) for path in effect.recipe):
            notes.append(f"{key} means nothing where activations are not calibrated")
            continue
        _collect(values, effect.recipe)
        run.update(effect.run)
        origin.update(dict.fromkeys(effect.recipe, key))
        if effect.note:
            notes.append(effect.note)
    kinds = " and ".join(dict.fromkeys((request.activation, request.weight)))
    for path in _meaningless(request, values):
        if values.pop(path, None) and path in origin:
            notes.append(f"{origin[path]} means nothing for {kinds}")
    return run


def _collect(values: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Later values win, but overrides of single tensors add up."""
    for path, value in more.items():
        values[path] = (*values.get(path, ()), *value) if path == "overrides" else value


def _recipe(values: Mapping[str, Any], run: Mapping[str, Any]) -> Recipe:
    return validate(merge(unfolded(values), dict(run.get("recipe_changes") or {})), "the config")


def _refuse_flags(config: QuantizationConfig) -> None:
    if config.include_auto_mp and not config.extra_options.get("AutoMixprecision"):
        raise QuarkConfigError(
            "Mixed precision needs to know which other type to use.",
            where="include_auto_mp",
            expected="extra_options={'AutoMixprecision': {'TargetLayerConfig': QLayerConfig(…)}}",
        )
    if config.crypto_mode:
        raise QuarkConfigError(
            "Roundel does not encrypt models.",
            where="crypto_mode",
            hint="Encrypt the finished file, or use the execution provider's encryption_key.",
        )


def _flag_notes(request: Request) -> Iterable[str]:
    config = request.config
    others = [name for name in config.execution_providers or () if name != "CPUExecutionProvider"]
    if others:
        yield f"execution_providers: calibration runs on the CPU, not on {', '.join(others)}"
    if config.log_severity_level is not None:
        yield "log_severity_level has never had an effect"
