"""Models in memory (onnx-ir), on disk, and inside ONNX Runtime."""

from roundel.model.files import save_model
from roundel.model.load import LoadedModel, load_model
from roundel.model.structure import ModelSource

__all__ = ["LoadedModel", "ModelSource", "load_model", "save_model"]
