"""Models in memory (onnx-ir), on disk, and inside ONNX Runtime."""

from roundel.model.files import save_model
from roundel.model.load import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model", "save_model"]
