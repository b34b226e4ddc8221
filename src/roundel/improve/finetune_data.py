"""The float and the quantized model side by side, each computed once and only as far as needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.calibrate.statistics import QuantState
from roundel.improve.finetune_rows import ArrayStore, SeenRows, StoredFrontier, held_from, on_cuda
from roundel.model.graph import values_by_name
from roundel.model.session import open_session
from roundel.qdq import simulate, write_qdq
from roundel.qdq.names import BEFORE, CODES
from roundel.recipe.settings import Recipe
from roundel.types import QParams, Sample


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where and how the branches run.

    Attributes:
        store: keeps their values.
        cuda: number of the GPU that runs the models; None for the CPU.
        mixed: whether the float branch's inputs are wanted, too.
    """

    store: ArrayStore
    cuda: int | None
    mixed: bool


class Delivered:
    """The quantized model as it will be written, with the constants tuned so far.

    Args:
        model: the prepared float model.
        state: calibrated.
        recipe: formats and arithmetic.
    """

    def __init__(self, model: ir.Model, state: QuantState, recipe: Recipe) -> None:
        self.model = write_qdq(model, state, _replaceable(recipe))
        simulate(self.model, state, recipe.npu)
        self._values = values_by_name(self.model.graph)
        self._nodes = {str(node.name): node for node in self.model.graph}
        self._given = values_by_name(model.graph)

    def replace(self, changed: Mapping[str, tuple[NDArray[Any], QParams | None]]) -> None:
        """Put new codes and scales, or new real numbers, into it."""
        for name, (codes, params) in changed.items():
            if params is None:
                self._values[name].const_value = ir.tensor(codes, name=name)
                continue
            stored = self._values[f"{name}{CODES}"]
            node = stored.consumers()[0]
            stored.const_value = ir.tensor(codes, name=stored.name)
            scale = node.inputs[1]
            assert scale is not None
            scale.const_value = ir.tensor(params.scale, name=scale.name)

    def seen_as(self, tensor: str) -> str:
        """The name of the real numbers that readers of a tensor get."""
        for use in self._given[tensor].uses():
            reader = self._nodes.get(str(use.node.name))
            value = reader.inputs[use.idx] if reader is not None else None
            if value is not None:
                return str(value.name)
        raise KeyError(tensor)

    def output_of(self, node: str) -> str:
        """The name of what a node makes, whatever stores it behind."""
        return str(self._nodes[node].outputs[0].name)

    def codes_of(self, tensor: str) -> str:
        """The name of a tensor's integer codes."""
        for name in (tensor, f"{tensor}{BEFORE}"):
            value = self._values.get(name)
            for node in value.consumers() if value is not None else ():
                if node.op_type == "QuantizeLinear":
                    return str(node.outputs[0].name)
        raise KeyError(tensor)


def _replaceable(recipe: Recipe) -> Recipe:
    """Short floats as float32 constants before casts: the same numbers, which tuning can replace."""
    plain: dict[str, Any] = {"output": {"half_weights": False, "strip_functions": False}}
    if {recipe.activations.type, recipe.weights.type} & {"bfloat16", "float16"}:
        form = "plain" if recipe.floats.form == "plain" else "cast"  # no bodies to inline, piece by piece
        plain["floats"] = {"form": form}
    return recipe.merged(plain)


class Branches:
    """Both models at the border between tuned and not yet tuned layers.

    Args:
        model: the prepared float model.
        delivered: the quantized one.
        samples: the inputs.
        place: where to run and what to keep.
    """

    def __init__(
        self, model: ir.Model, delivered: Delivered, samples: Sequence[Sample], place: LayerPlace
    ) -> None:
        self._delivered, self._place = delivered, place
        self._tuned = StoredFrontier(delivered.model, samples, place.store, cuda=place.cuda)
        self._plain = StoredFrontier(model, samples, place.store, cuda=place.cuda)

    def look(self, data: str, output: str, params: QParams | None, linear: str | None = None) -> SeenRows:
        """What a layer sees and should give; everything before it runs if it has not.

        Args:
            data: its input.
            output: the tensor that its loss looks at.
            params: format of its input; None where it is not in integers.
            linear: its output before the activation, where that is wanted, too.
        """
        name = self._delivered.seen_as(data) if params is None else self._delivered.codes_of(data)
        codes = self._tuned.reach(name)
        plain = self._plain.reach(data) if self._place.mixed else None
        before = None if linear is None else self._plain.reach(linear)
        return SeenRows(codes, plain, before, self._plain.reach(output), params)

    def release(self) -> None:
        """Forget values that nothing will read any more."""
        self._tuned.release()
        self._plain.release()


class Judge:
    """Measures the whole model's outputs on the held-out samples.

    Args:
        model: the prepared float model.
        samples: all samples; the last fifth judges.
        cuda: number of the GPU that runs the models; None for the CPU.
    """

    def __init__(self, model: ir.Model, samples: Sequence[Sample], cuda: int | None) -> None:
        self._held = samples[held_from(len(samples)) :]
        self._cuda = cuda
        self._wanted = self._run(model)

    def error(self, model: ir.Model) -> float:
        """Mean squared error of the outputs over their own power."""
        errors, powers = 0.0, 0.0
        for wanted, got in zip(self._wanted, self._run(model), strict=True):
            for a, b in zip(wanted, got, strict=True):
                if a.dtype.kind == "f" and a.size:
                    powers += float(np.square(a, dtype=np.float64).mean())
                    errors += float(np.square(b.astype(np.float64) - a).mean())
        return errors / max(powers, 1e-30)

    def _run(self, model: ir.Model) -> list[list[NDArray[Any]]]:
        session = open_session(model, simulate=True)
        if self._cuda is not None:
            on_cuda(session, self._cuda)
        return [list(session.run(None, sample)) for sample in self._held]
