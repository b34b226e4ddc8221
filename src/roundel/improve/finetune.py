"""What fine-tuning has done so far: one file of plain arrays for each layer."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from numpy.typing import NDArray

from roundel.calibrate.statistics import QuantState
from roundel.improve.finetune_constants import Changed, Constants
from roundel.improve.finetune_data import Branches, Delivered, Judge, LayerPlace
from roundel.improve.finetune_rows import ArrayStore, gather_rows, layer_seed
from roundel.improve.finetune_units import Block, Unit, find_units, with_blocks
from roundel.improve.memory import params_as_arrays, unpacked_params
from roundel.improve.reports import FinetuneReport, Moment
from roundel.improve.torch_device import infer_device, optim_device, require_torch
from roundel.numerics.blas import one_blas_thread
from roundel.numerics.metrics import layer_db
from roundel.recipe.settings import Recipe
from roundel.types import QParams, Sample
from roundel.work.checkpoints import Memory, as_array, as_tree

if TYPE_CHECKING:
    from roundel.improve.torch_training import BlockTask, TrainingOutcome, TrainingTask

_FACTS = "facts"

Changes = dict[str, tuple[NDArray[Any], QParams | None]]  # codes with their format, or real numbers


@dataclass(slots=True)
class TunedSoFar:
    """Layers that are done, what was reported about them, and the constants that changed."""

    reports: list[FinetuneReport] = field(default_factory=list)
    changes: Changes = field(default_factory=dict)


def save_layer(memory: Memory, number: int, report: FinetuneReport, changes: Changes) -> None:
    """Write one layer down.

    Raises:
        OutputError: it cannot be written.
    """
    words, arrays = params_as_arrays({name: p for name, (_, p) in changes.items() if p is not None})
    arrays |= {f"codes.{place}": codes for place, (codes, _) in enumerate(changes.values())}
    facts = {"report": asdict(report), "params": words, "names": list(changes)}
    memory.save(number, {**arrays, _FACTS: as_array(facts)})


def load(memory: Memory) -> TunedSoFar:
    """The layers that an earlier run has done, from the first on.

    Raises:
        DataError: a file is damaged, or of another run.
    """
    progress = TunedSoFar()
    while (arrays := memory.load(len(progress.reports))) is not None:
        facts = as_tree(arrays[_FACTS])
        params = unpacked_params(facts["params"], arrays)
        progress.changes |= {
            name: (arrays[f"codes.{place}"], params.get(name)) for place, name in enumerate(facts["names"])
        }
        progress.reports.append(FinetuneReport(**facts["report"]))
    return progress


Listener = Callable[[Moment], None]
Item = Unit | Block


@one_blas_thread()
def finetune(
    model: ir.Model,
    state: QuantState,
    samples: Sequence[Sample],
    recipe: Recipe,
    *,
    progress: Listener | None = None,
    memory: Memory | None = None,
) -> tuple[QuantState, tuple[FinetuneReport, ...]]:
    """Tune rounding or weights layer by layer; scales of weights and activations stay.

    Args:
        model: the prepared float model.
        state: calibrated, legal for its target, and maybe rounded by `walk`: tuning starts from its codes.
        samples: inputs; the last fifth judges.
        recipe: says which algorithm and how.
        progress: called at the beginning, now and then while a layer learns, and after each layer.
        memory: holds what is done after each layer; what it has is not done again, and the result is that
            of a run without a break.

    Raises:
        DependencyError: torch is not installed.
        RecipeError: a device is not there, or a setting does not fit the model.
        DataError: the checkpoint is damaged or of another run.
    """
    settings, algorithm = recipe.improve.finetune, recipe.finetuning
    used = samples[: settings.data_size]
    if algorithm == "none" or len(used) < 2:
        return state, ()
    require_torch()
    run = _Run(model, state, used, recipe, progress)
    if memory is not None:
        run.remember(memory)
    run.tell(0.0)
    if settings.parallel:
        run.side_by_side()
    else:
        run.one_by_one()
    return run.constants.state, tuple(run.done.reports)


def check_tuning(recipe: Recipe) -> None:
    """Find out now, not after calibration, whether torch and the devices are there.

    Raises:
        DependencyError: torch is not installed.
        RecipeError: a device is not there.
    """
    if recipe.finetuning == "none":
        return
    require_torch()
    settings = recipe.improve.finetune
    optim_device(settings.optim_device)
    infer_device(settings.infer_device)


@dataclass(frozen=True, slots=True)
class _Devices:
    optim: str
    infer: int | None


class _Run:
    """One call of `finetune`."""

    def __init__(
        self,
        model: ir.Model,
        state: QuantState,
        samples: Sequence[Sample],
        recipe: Recipe,
        listener: Listener | None,
    ) -> None:
        settings = recipe.improve.finetune
        self._devices = _Devices(optim_device(settings.optim_device), infer_device(settings.infer_device))
        self._model, self._samples, self._recipe, self._listener = model, samples, recipe, listener
        self._algorithm, self._settings = recipe.finetuning, settings
        self.constants = Constants(model.graph, state, recipe)
        self._rounded = frozenset(state.codes)
        self._delivered = Delivered(model, state, recipe)
        # With `parallel` the branches keep the model before tuning, whatever is delivered.
        seen = Delivered(model, state, recipe) if settings.parallel else self._delivered
        self._store = ArrayStore(settings.mem_opt_level)
        place = LayerPlace(self._store, self._devices.infer, settings.drop_ratio < 1)
        self._branches = Branches(model, seen, samples, place)
        units = find_units(model.graph, seen.model.graph, state, settings, self._algorithm)
        self._items: tuple[Item, ...] = units
        if settings.block_wise and units:
            self._items = with_blocks(model.graph, units, state)
        self.done, self._restored = TunedSoFar(), 0
        self._memory: Memory | None = None
        self._judge = Judge(model, samples, self._devices.infer) if settings.selective_update else None
        self._error = math.inf

    def remember(self, memory: Memory) -> None:
        """Write each layer down; take over what an earlier run has done."""
        self._memory = memory
        self.done = load(memory)
        self._restored = len(self.done.reports)

    def tell(self, share: float, loss: float | None = None) -> None:
        """Say how far it is: the finished share of the layer that learns now, and its loss."""
        if self._listener is not None:
            # A layer that has learned has yet to be judged: whole numbers are finished layers.
            self._listener(Moment(len(self.done.reports) + min(share, 0.99), len(self._items), loss))

    def one_by_one(self) -> None:
        """Each layer sees the tuned layers before it."""
        with _one_thread():
            for number, item in enumerate(self._items):
                start = time.perf_counter()
                job = self._look(item, number)
                if job is None:
                    self._restore(item)
                else:
                    self._finish(item, job.run(self.tell), start)
                self._branches.release()

    def side_by_side(self) -> None:
        """Each layer sees the layers before it as they were: several can be tuned at once."""
        waiting: deque[tuple[Item, Future[TrainingOutcome], float]] = deque()
        workers = os.cpu_count() or 1 if self._devices.optim == "cpu" else 1
        with _one_thread(), ThreadPoolExecutor(workers) as pool:
            for number, item in enumerate(self._items):
                start = time.perf_counter()
                job = self._look(item, number)
                self._branches.release()
                if job is None:
                    self._restore(item)
                    continue
                waiting.append((item, pool.submit(job.run), start))
                if len(waiting) > workers:  # bounds the rows in memory
                    self._take(waiting)
            while waiting:
                self._take(waiting)

    def _take(self, waiting: deque[tuple[Item, Future[TrainingOutcome], float]]) -> None:
        item, future, start = waiting.popleft()
        self._finish(item, future.result(), start)

    def _look(self, item: Item, number: int) -> TrainingTask | BlockTask | None:
        """What a layer's tuning needs; None for a layer that the checkpoint has."""
        data = item.entry if isinstance(item, Block) else item.layer.data
        # Also for a restored layer: the same pieces of the model run as in a run without a break.
        params = self.constants.state.params.get(data)
        seen = self._branches.look(data, item.output, params, self._linear(item))
        if number < self._restored:
            return None
        common = self.constants, self._algorithm, self._settings, self._devices.optim
        if isinstance(item, Block):
            from roundel.improve.torch_training import BlockTask

            return BlockTask(item, tuple(self.constants.weights(unit) for unit in item.units), seen, *common)
        from roundel.improve.torch_training import TrainingTask

        weights = self.constants.weights(item)
        seed = layer_seed(self._settings.seed, item.layer.name)
        output = self.constants.format_of(item.output) if self._settings.output_qdq else None
        return TrainingTask(
            item, weights, gather_rows(item, seen, weights.shape, self._store, seed), output, *common
        )

    def _linear(self, item: Item) -> str | None:
        """The output before the activation of a layer that was rounded for other inputs than it sees now."""
        if isinstance(item, Block) or item.normalizes or item.layer.weight not in self._rounded:
            return None
        return item.layer.output

    def _restore(self, item: Item) -> None:
        names = [name for unit in _units(item) for name in (unit.layer.weight, unit.layer.bias)]
        changed = {n: self.done.changes[n] for n in names if n is not None and n in self.done.changes}
        self.constants.restore(changed)
        self._delivered.replace(changed)

    def _finish(self, item: Item, outcome: TrainingOutcome, start: float) -> None:
        """Take a layer over where it is better; report, remember."""
        kept = outcome.after < outcome.before and self._accept(outcome)
        error = outcome.after if kept else outcome.before
        report = FinetuneReport(
            layer=item.name,
            op="Block" if isinstance(item, Block) else item.layer.op,
            before_db=layer_db(outcome.power, outcome.before),
            after_db=layer_db(outcome.power, error),
            iterations=outcome.iterations,
            seconds=time.perf_counter() - start,
            kept=kept,
        )
        self.done.reports.append(report)
        if self._memory is not None:
            names = [name for unit in _units(item) for name in (unit.layer.weight, unit.layer.bias)]
            changed = {name: self.done.changes[name] for name in names if name in self.done.changes}
            save_layer(self._memory, len(self.done.reports) - 1, report, changed if kept else {})
        self.tell(0.0, error / max(outcome.power, 1e-30))

    def _accept(self, outcome: TrainingOutcome) -> bool:
        """Put the new constants in; out again where the whole model gets worse and that counts."""
        before, changed, old = self.constants.state, Changed(), Changed()
        if self._judge is not None and math.isinf(self._error):
            self._error = self._judge.error(self._delivered.model)
        for change in outcome.changes:
            names = (change.layer.weight, change.layer.bias)
            old |= {name: self.constants.stored(name) for name in names if name is not None}
            changed |= self.constants.accept(change.layer, change.tuned)
        old = {name: old[name] for name in changed}
        self._delivered.replace(changed)
        if self._judge is not None:
            error = self._judge.error(self._delivered.model)
            if error >= self._error:
                self._delivered.replace(old)
                self.constants.state = before
                return False
            self._error = error
        self.done.changes |= changed
        return True


def _units(item: Item) -> tuple[Unit, ...]:
    return item.units if isinstance(item, Block) else (item,)


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
