"""Models in memory (onnx-ir), on disk, and inside ONNX Runtime."""

from roundel.model.load import LoadedModel, load_model
from roundel.model.save import save_model

__all__ = ["LoadedModel", "load_model", "save_model"]
