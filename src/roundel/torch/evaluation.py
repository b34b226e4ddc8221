"""A finished model as a torch module, for the evaluation loop that the user has already."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from roundel.errors import DataError
from roundel.model.session import open_session
from roundel.torch.export import array


class QuantizedModule(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Runs a quantized model in ONNX Runtime: torch tensors in and out, without gradients.

    Results lie on the device of the first input. They are those of the file as it is written, without the
    integer kernels of one particular CPU.
    """

    def __init__(self, model: ir.Model) -> None:
        super().__init__()
        self._session = open_session(model, simulate=True)
        self.input_names = tuple(one.name for one in self._session.get_inputs())
        self.output_names = tuple(one.name for one in self._session.get_outputs())
        self._types = {value.name: value.dtype for value in model.graph.inputs}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One tensor, or a tuple of them in the order of `output_names`.

        Raises:
            DataError: inputs are missing, unknown, or given twice.
        """
        fed = dict(zip(self.input_names, args, strict=False)) | kwargs
        if set(fed) != set(self.input_names) or len(args) + len(kwargs) != len(self.input_names):
            raise DataError(
                "The model takes other inputs.",
                observed=f"{len(args)} by position" + (f", {', '.join(kwargs)} by name" if kwargs else ""),
                expected=", ".join(self.input_names),
            )
        first = next(iter(fed.values()))
        feed = {name: self._array(name, value) for name, value in fed.items()}
        made = [torch.from_numpy(np.asarray(out)) for out in self._session.run(None, feed)]
        if torch.is_tensor(first):
            made = [out.to(first.device) for out in made]
        return made[0] if len(made) == 1 else tuple(made)

    def _array(self, name: str, value: Any) -> Any:
        given = array(value) if torch.is_tensor(value) else np.asarray(value)
        wanted = self._types[name]
        return given if wanted is None else np.ascontiguousarray(given, wanted.numpy())
