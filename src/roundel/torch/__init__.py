"""PyTorch in: modules, .pt2 files and factories become ONNX models that the pipeline takes like any other."""

from __future__ import annotations

from roundel.torch.opening import Exported, is_torch_source, opened, require_exporter, require_torch

__all__ = ["Exported", "is_torch_source", "opened", "require_exporter", "require_torch"]
