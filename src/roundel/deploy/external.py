"""The files beside a model that hold its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import onnx_ir as ir

from roundel.errors import ModelError


def external_files(model: ir.Model, path: Path) -> dict[str, Path]:
    """The external data files of a model: location as the model spells it, and the file.

    Raises:
        ModelError: a location leaves the model's folder, directly or through a symbolic link.
    """
    home = path.absolute().parent
    found: dict[str, Path] = {}
    for tensor in _external_tensors(model):
        location = str(tensor.location).replace("\\", "/")
        parts = PurePosixPath(location).parts
        source = home.joinpath(*parts)
        outside = ".." in parts or PurePosixPath(location).is_absolute() or ":" in location
        if outside or not source.resolve().is_relative_to(home.resolve()):
            raise ModelError(
                "A weight's external data lies outside the model's folder.",
                where=f"{path}, tensor '{tensor.name}'",
                observed=location,
                expected="a file in the model's own folder",
                hint="Save the model again with its weights beside it.",
            )
        if not source.is_file():
            raise ModelError(
                "A weight's external data file does not exist.",
                where=f"{path}, tensor '{tensor.name}'",
                observed=location,
                hint="Keep the .data file in the model's own folder.",
            )
        found[PurePosixPath(*parts).as_posix()] = source
    return dict(sorted(found.items()))


def _external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value.const_value
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for node in (node for body in bodies for node in body.all_nodes()):
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                yield attribute.value
