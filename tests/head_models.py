"""Small detectors with the heads of the usual families, which rearrange what their last Conv make."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from helpers import build, node, normal

BINS = 8
_INPUT = {"x": [1, 3, 16, 16]}
_TRUNK = [
    node("Conv", ["x", "w"], ["t"], name="trunk", pads=[1, 1, 1, 1]),
    node("Relu", ["t"], ["r"], name="relu"),
    node("Conv", ["r", "wd"], ["d"], name="down", strides=[2, 2]),
    node("Relu", ["d"], ["rd"], name="relu_down"),
]
_WEIGHTS = {"w": normal(8, 3, 3, 3), "wd": normal(8, 8, 2, 2, seed=1, scale=0.3)}


def yolov8() -> onnx.ModelProto:
    """Boxes as distributions over distances (DFL), and a mask's prototypes as an output of their own."""
    nodes = list(_TRUNK)
    for scale, source, count in (("0", "r", 256), ("1", "rd", 64)):
        nodes += [
            node("Conv", [source, "wb"], [f"b{scale}"], name=f"boxes{scale}"),
            node("Conv", [source, "ws"], [f"s{scale}"], name=f"scores{scale}"),
            node("Concat", [f"b{scale}", f"s{scale}"], [f"j{scale}"], name=f"join{scale}", axis=1),
            node("Reshape", [f"j{scale}", f"rows{count}"], [f"f{scale}"], name=f"flat{scale}"),
        ]
    nodes += [
        node("Concat", ["f0", "f1"], ["all"], name="all", axis=2),
        node("Split", ["all", "sizes"], ["boxes", "logits"], name="split", axis=1),
        node("Reshape", ["boxes", "by_side"], ["sides"], name="sides"),
        node("Transpose", ["sides"], ["turned"], name="turn", perm=[0, 2, 1, 3]),
        node("Softmax", ["turned"], ["soft"], name="soft", axis=1),
        node("Conv", ["soft", "bins"], ["sum"], name="dfl"),
        node("Reshape", ["sum", "as_boxes"], ["distances"], name="distances"),
        node("Mul", ["distances", "stride"], ["pixels"], name="pixels"),
        node("Sigmoid", ["logits"], ["scores"], name="scores"),
        node("Concat", ["pixels", "scores"], ["y"], name="join", axis=1),
        node("Conv", ["r", "wm"], ["m"], name="mask_layer"),
        node("Sigmoid", ["m"], ["gate"], name="gate"),
        node("Mul", ["m", "gate"], ["mask"], name="mask"),
    ]
    constants = {
        **_WEIGHTS,
        "wb": normal(4 * BINS, 8, 1, 1, seed=2),
        "ws": normal(3, 8, 1, 1, seed=3),
        "wm": normal(2, 8, 1, 1, seed=4),
        "rows256": np.int64([1, 4 * BINS + 3, 256]),
        "rows64": np.int64([1, 4 * BINS + 3, 64]),
        "sizes": np.int64([4 * BINS, 3]),
        "by_side": np.int64([1, 4, BINS, 320]),
        "bins": np.arange(BINS, dtype=np.float32).reshape(1, BINS, 1, 1),
        "as_boxes": np.int64([1, 4, 320]),
        "stride": np.float32(16),
    }
    return build(nodes, _INPUT, ["y", "mask"], constants)


def yolox() -> onnx.ModelProto:
    """Raw boxes beside scores behind Sigmoid, joined, flattened and turned."""
    nodes = [
        *_TRUNK,
        node("Conv", ["rd", "wb"], ["b"], name="boxes"),
        node("Conv", ["rd", "ws"], ["s"], name="scores"),
        node("Sigmoid", ["s"], ["p"], name="sure"),
        node("Concat", ["b", "p"], ["j"], name="join", axis=1),
        node("Reshape", ["j", "rows"], ["f"], name="flat"),
        node("Transpose", ["f"], ["y"], name="turn", perm=[0, 2, 1]),
    ]
    constants = {
        **_WEIGHTS,
        "wb": normal(4, 8, 1, 1, seed=2),
        "ws": normal(3, 8, 1, 1, seed=3),
        "rows": np.int64([1, 7, 64]),
    }
    return build(nodes, _INPUT, ["y"], constants)


def ssd() -> onnx.ModelProto:
    """Layers whose results are turned, flattened, and joined over the scales; boxes as exponents."""
    nodes = list(_TRUNK)
    for kind in ("boxes", "scores"):
        width = f"w{kind[0]}"
        for scale, source in (("0", "r"), ("1", "rd")):
            name = f"{kind}{scale}"
            nodes += [
                node("Conv", [source, width], [f"{name}_c"], name=name),
                node("Transpose", [f"{name}_c"], [f"{name}_t"], name=f"{name}_turn", perm=[0, 2, 3, 1]),
                node("Reshape", [f"{name}_t", f"{kind}_rows"], [f"{name}_f"], name=f"{name}_flat"),
            ]
        nodes.append(node("Concat", [f"{kind}0_f", f"{kind}1_f"], [f"{kind}_all"], name=kind, axis=1))
    nodes += [
        node("Sigmoid", ["scores_all"], ["scores"], name="sure"),
        node("Mul", ["boxes_all", "variance"], ["scaled"], name="scaled"),
        node("Exp", ["scaled"], ["boxes"], name="exp"),
    ]
    constants = {
        **_WEIGHTS,
        "wb": normal(4, 8, 1, 1, seed=2),
        "ws": normal(3, 8, 1, 1, seed=3),
        "boxes_rows": np.int64([1, -1, 4]),
        "scores_rows": np.int64([1, -1, 3]),
        "variance": np.float32(0.1),
    }
    return build(nodes, _INPUT, ["boxes", "scores"], constants)


# By family: the detector, and what its first part makes.
FAMILIES: dict[str, tuple[Callable[[], onnx.ModelProto], tuple[str, ...]]] = {
    "YOLOv8": (yolov8, ("b0", "s0", "b1", "s1", "mask")),
    "YOLOX": (yolox, ("b", "s")),
    "SSD": (ssd, ("boxes0_c", "boxes1_c", "scores0_c", "scores1_c")),
}
