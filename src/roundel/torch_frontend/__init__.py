"""PyTorch in: modules, .pt2 files and factories become ONNX models that the pipeline takes like any other."""

from roundel.torch_frontend.opening import Exported, is_torch_source, opened

__all__ = ["Exported", "is_torch_source", "opened"]
