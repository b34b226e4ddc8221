"""dump_model: every tensor of a quantized model for one sample, as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.data import RandomSpec, open_samples
from roundel.model.graph import input_specs
from roundel.model.load import load_model
from roundel.model.session import open_session
from roundel.quark.errors import QuarkDataError

_QUANTIZERS = ("QuantizeLinear", "ExtendedQuantizeLinear")


def dump_model(
    model_input: str | Path | onnx.ModelProto,
    dump_data_reader: Any = None,
    random_data_reader_input_shape: Mapping[str, Sequence[int]] | None = None,
    dump_float: bool = False,
    output_dir: str | Path = "./dump_results",
) -> None:
    """Run one sample and write the codes of every quantized tensor: NAME.bin, and NAME.txt to be read.

    Args:
        model_input: the quantized model.
        dump_data_reader: gives the sample; random values without one.
        random_data_reader_input_shape: shapes by input name, for random values.
        dump_float: also write every float tensor, as NAME_float.bin and NAME_float.txt.
        output_dir: the folder to write into; made when it is not there.
    """
    model = load_model(model_input, allow_quantized=True).model
    wanted = {
        str(node.outputs[0].name): str(node.inputs[0].name if node.inputs[0] is not None else node.name)
        for node in model.graph
        if node.op_type in _QUANTIZERS
    }
    seen = {str(v.name): v for node in model.graph for v in node.outputs if v.name}
    shown = [v for name, v in seen.items() if dump_float or name in wanted]
    model.graph.outputs.extend(v for v in shown if not v.is_graph_output())
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in _run(model, dump_data_reader, random_data_reader_input_shape).items():
        if name in wanted:
            _write(folder / _safe(wanted[name]), array)
        elif dump_float and array.dtype.kind == "f":
            _write(folder / f"{_safe(name)}_float", array)


def _run(model: ir.Model, reader: Any, shapes: Mapping[str, Sequence[int]] | None) -> dict[str, NDArray[Any]]:
    random = None
    if reader is None:
        sizes = {name: tuple(shape) for name, shape in (shapes or {}).items()}
        random = RandomSpec(count=1, shapes=sizes)
    sample = next(iter(open_samples(reader, input_specs(model), random=random)), None)
    if sample is None:
        raise QuarkDataError("The reader gives no sample.", expected="at least one")
    session = open_session(model, simulate=True)
    names = [out.name for out in session.get_outputs()]
    return dict(zip(names, session.run(None, sample), strict=True))


def _safe(name: str) -> str:
    return name.replace("/", "_").replace(":", "_")


def _write(path: Path, array: NDArray[Any]) -> None:
    flat = array.reshape(-1)
    flat.tofile(path.with_name(f"{path.name}.bin"))
    np.savetxt(path.with_name(f"{path.name}.txt"), flat, fmt="%d" if flat.dtype.kind in "iu" else "%.9g")
