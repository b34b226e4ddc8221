"""AdaRound and AdaQuant over a whole model: the float and the quantized one side by side, layer by layer."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import onnx_ir as ir

from roundel.errors import RecipeError
from roundel.improve.constants import Changed, Constants, Written
from roundel.improve.finetune_rows import SeenRows, gather_rows, layer_seed
from roundel.improve.layers import Unit, find_units
from roundel.improve.memory import load_layer, save_layer
from roundel.improve.stepwise import StepwiseRunner
from roundel.model.session import runtime_has_cuda
from roundel.numerics.metrics import layer_db
from roundel.numerics.rounding import one_blas_thread
from roundel.recipe.settings import Recipe
from roundel.state import LayerReport, State
from roundel.torch import require_torch
from roundel.types import Listener, Sample, Silent
from roundel.work.checkpoints import Memory

if TYPE_CHECKING:
    from roundel.improve.torch_training import TrainingOutcome

_NAMES = {"adaround": "AdaRound", "adaquant": "AdaQuant"}
_DEVICE = re.compile(r"cpu|cuda(?::(\d+))?")


@one_blas_thread()
def finetune(
    model: ir.Model,
    state: State,
    samples: Sequence[Sample],
    recipe: Recipe,
    *,
    progress: Listener | None = None,
    memory: Memory | None = None,
) -> tuple[State, tuple[LayerReport, ...]]:
    """Tune rounding or weights layer by layer; scales of weights and activations stay.

    Args:
        model: the prepared float model.
        state: calibrated, legal for its target, and maybe rounded before: tuning starts from its codes.
        samples: inputs; the last fifth judges.
        recipe: says which algorithm and how.
        progress: told the number of layers, and how many are done, with the share of the one that learns.
        memory: holds what is done after each layer; what it has is not done again, and the result is that
            of a run without a break.

    Raises:
        DependencyError: torch is not installed.
        RecipeError: a device is not there, or a setting does not fit the model.
        DataError: the checkpoint is damaged or of another run.
    """
    used = samples[: recipe.improve.finetune.data_size]
    if recipe.finetuning == "none" or len(used) < 2:
        return state, ()
    require_torch("Fine-tuning with PyTorch needs")
    run = _Run(model, state, used, recipe, progress or Silent())
    with _one_thread():
        reports = run.all(memory)
    return run.constants.state, tuple(reports)


def check_tuning(recipe: Recipe) -> None:
    """Find out now, not after calibration, whether torch and the devices are there.

    Raises:
        DependencyError: torch is not installed.
        RecipeError: a device is not there.
    """
    if recipe.finetuning == "none":
        return
    require_torch("Fine-tuning with PyTorch needs")
    settings = recipe.improve.finetune
    optim_device(settings.optim_device)
    infer_device(settings.infer_device)


class _Run:
    """One call of `finetune`: each layer sees the tuned layers before it."""

    def __init__(
        self,
        model: ir.Model,
        state: State,
        samples: Sequence[Sample],
        recipe: Recipe,
        listener: Listener,
    ) -> None:
        self._algorithm, self._settings = recipe.finetuning, recipe.improve.finetune
        self._device, self._listener = optim_device(self._settings.optim_device), listener
        self._rounded = frozenset(state.codes)
        self.constants, self._written = (
            Constants(model.graph, state, recipe),
            Written.of(model, state, recipe),
        )
        cuda = infer_device(self._settings.infer_device)
        self._short = StepwiseRunner(self._written.model, samples, cuda)
        self._plain = StepwiseRunner(state.truth, samples, cuda)
        quantized = self._written.model.graph
        self._units = find_units(model.graph, quantized, state, self._settings, self._algorithm)

    def all(self, memory: Memory | None) -> list[LayerReport]:
        """Every layer, those that an earlier run has done from its memory."""
        known = [] if memory is None else _known(memory)
        self._listener.step(f"fine-tune by {_NAMES[self._algorithm]}", len(self._units))
        self._listener.advance(len(known))
        reports = []
        for number, unit in enumerate(self._units):
            start = time.perf_counter()
            # Also for a layer that is known: the same pieces of the model run as in a run without a break.
            seen = self._look(unit)
            done = number < len(known)
            report, changed = known[number] if done else self._tune(unit, seen, number, start)
            self.constants.take(changed)
            self._written.replace(changed)
            if memory is not None and not done:
                save_layer(memory, number, report, changed)
            self._listener.advance(max(number + 1, len(known)))
            reports.append(report)
            self._short.release()
            self._plain.release()
        return reports

    def _look(self, unit: Unit) -> SeenRows:
        """What a layer sees and should give; everything before it runs if it has not."""
        data, params = unit.layer.data, self.constants.state.params.get(unit.layer.data)
        name = self._written.seen_as(data) if params is None else self._written.codes_of(data)
        codes = self._short.run_to(name)
        # A layer that was rounded for other inputs than it sees now is solved anew, before the activation.
        again = unit.layer.weight in self._rounded and not unit.layer.normalizes
        linear = self._plain.run_to(unit.layer.output) if again else None
        return SeenRows(codes, linear, self._plain.run_to(unit.output), params)

    def _tune(self, unit: Unit, seen: SeenRows, number: int, start: float) -> tuple[LayerReport, Changed]:
        from roundel.improve.torch_training import TrainingTask, tune

        def heard(share: float, loss: float) -> None:
            # A layer that has learned has yet to be judged: whole numbers are finished layers.
            self._listener.advance(number + min(share, 0.99))
            self._listener.say(f"loss {loss:.1e}")

        weights = self.constants.weights(unit)
        rows = gather_rows(unit, seen, weights.shape, layer_seed(self._settings.seed, unit.layer.name))
        how = self._algorithm, self._settings, self._device
        outcome = tune(TrainingTask(unit, weights, rows, self.constants, *how), heard)
        kept = outcome.after < outcome.before
        changed = self.constants.changes(unit.layer, outcome.tuned) if kept else {}
        return _report(unit, outcome, kept, time.perf_counter() - start), changed


def _known(memory: Memory) -> list[tuple[LayerReport, Changed]]:
    """The layers that an earlier run has done, from the first on."""
    found: list[tuple[LayerReport, Changed]] = []
    while (layer := load_layer(memory, len(found))) is not None:
        found.append(layer)
    return found


def _report(unit: Unit, outcome: TrainingOutcome, kept: bool, seconds: float) -> LayerReport:
    errors = outcome.before, outcome.after if kept else outcome.before
    before, after = (layer_db(outcome.power, error) for error in errors)
    return LayerReport(unit.layer.name, unit.layer.op, before, after, kept, seconds, outcome.iterations)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch on one core: steps are too small to share, and on a busy machine waiting costs tenfold."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def optim_device(name: str) -> str:
    """The device as torch names it.

    Raises:
        RecipeError: no such device here.
    """
    lacks = device_lacks("optim_device", name)
    if lacks is not None:
        raise _missing("optim_device", name, lacks)
    number = _number("optim_device", name)
    return "cpu" if number is None else f"cuda:{number}"


def infer_device(name: str) -> int | None:
    """The number of the GPU that runs models, or None for the CPU.

    Raises:
        RecipeError: ONNX Runtime has no such device here.
    """
    lacks = device_lacks("infer_device", name)
    if lacks is not None:
        raise _missing("infer_device", name, lacks)
    return _number("infer_device", name)


def device_lacks(option: str, name: str) -> str | None:
    """Why fine-tuning cannot have this device here; None where it can.

    Args:
        option: optim_device, which torch must have, or infer_device, which ONNX Runtime must.
        name: cpu, cuda or cuda:N.

    Raises:
        RecipeError: the name is of no device.
    """
    number = _number(option, name)
    if number is None:
        return None
    if option == "infer_device":
        return None if runtime_has_cuda() else "ONNX Runtime has no CUDA provider here"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"torch sees {count} CUDA devices" if number >= count else None


def _number(option: str, name: str) -> int | None:
    match = _DEVICE.fullmatch(name)
    if match is None:
        raise RecipeError(
            "Unknown device.",
            where=f"improve.finetune.{option}",
            observed=name,
            expected="cpu, cuda or cuda:N",
        )
    return None if name == "cpu" else int(match.group(1) or 0)


def _missing(option: str, name: str, observed: str) -> RecipeError:
    return RecipeError(
        "The device that was asked for is not there.",
        where=f"improve.finetune.{option}: {name}",
        observed=observed,
        hint=f"Set improve.finetune.{option}: cpu, or install a build with CUDA.",
    )
