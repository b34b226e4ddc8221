"""Block formats by Roundel and by AMD Quark's compiled operators, in one process (the ``quark`` environment).

``--golden FILE`` writes what Quark's library makes of some tensors; the repository's tests compare with it.
``--model FILE`` quantizes a model with Roundel and runs it both ways: with function bodies and no library,
and bare with Quark's. Without either, both are timed in turns on the same tensors, and their results compared
bit for bit.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from protocol import emit

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

DOMAIN = "com.amd.quark"
BFP, MX = "BFPQuantizeDequantize", "MXQuantizeDequantize"
PRIME = {"bfp_method": "to_bfp_prime", "block_size": 16, "sub_block_size": 2, "sub_block_shift_bits": 1}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "bfp16": (BFP, {"bfp_method": "to_bfp", "bit_width": 16, "block_size": 8, "rounding_mode": 2}),
    **{
        f"mx{name}": (BFP, {**PRIME, "bit_width": bits, "rounding_mode": 2})
        for name, bits in ((4, 11), (6, 13), (9, 16))
    },
    **{
        f"mx{name.replace('_', '')}": (MX, {"element_dtype": name, "block_size": 32, "rounding_mode": 2})
        for name in ("fp8_e5m2", "fp8_e4m3", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "int8")
    },
}
# What the presets leave at its default, for the golden file.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"bfp16 rounding {mode}": (BFP, {**FORMATS["bfp16"][1], "rounding_mode": mode}) for mode in (0, 1)},
    **{f"mx9 rounding {mode}": (BFP, {**FORMATS["mx9"][1], "rounding_mode": mode}) for mode in (0, 1)},
    **{f"mxint8 rounding {mode}": (MX, {**FORMATS["mxint8"][1], "rounding_mode": mode}) for mode in (0, 1)},
    "bfp 10 bits": (BFP, {**FORMATS["bfp16"][1], "bit_width": 10}),
    "bfp 24 bits": (BFP, {**FORMATS["bfp16"][1], "bit_width": 24, "block_size": 5}),
    "bfp compiler": (BFP, {**FORMATS["bfp16"][1], "use_compiler_version_cpu_kernel": 1}),
    "bfp bfloat16 first": (BFP, {**FORMATS["bfp16"][1], "convert_to_bfloat_before_bfp": 1}),
    "mx wide shifts": (BFP, {**PRIME, "bit_width": 14, "block_size": 12, "sub_block_size": 4}),
}
# Type, scale: AMD's quantize and dequantize operators, one after the other.
PAIRS = (("BFLOAT16", 1.0), ("BFLOAT16", 0.37), ("FLOAT16", 1.0))
VARIANTS["mx wide shifts"][1].update(sub_block_shift_bits=3, rounding_mode=2)
SHAPES: tuple[tuple[str, tuple[int, ...], int], ...] = (
    ("convolution weight", (256, 256, 3, 3), 1),
    ("image activation", (1, 64, 112, 112), 1),
    ("matrix, last axis", (1024, 1024), -1),
    ("matrix, first axis", (1024, 1024), 0),
    ("tokens", (1, 197, 768), -1),
)
WHOLE = ("bf16", "bfp16", "mx9", "mxfp8e4m3", "mxint8")  # formats of which a whole model is run in both forms
Array = Any
Session = Any


def golden_tensors() -> dict[str, tuple[Array, int]]:
    """Small tensors with everything that a float can be, and the axis of their blocks."""
    generator = np.random.default_rng(20240717)
    signs = generator.choice([-1.0, 1.0], (48, 64))
    tensors = {
        "ordinary": (generator.normal(size=(2, 40, 3)), 1),
        "last axis": (generator.normal(size=(5, 37)), -1),
        "first axis": (generator.normal(size=(35, 3)), 0),
        "short": (generator.normal(size=(2, 3, 4, 4)), 1),
        "vector": (generator.normal(size=(77,)), 1),
        "one value": (np.asarray([[1.2345678]]), 1),
        "any bits": (generator.integers(0, 2**32, (4, 64), np.uint64).astype(np.uint32).view(np.float32), 1),
        "all scales": (
            np.ldexp(signs[:16], generator.integers(-149, 128, (16, 1))) * _mantissas(generator),
            1,
        ),
        "wide blocks": (np.ldexp(signs[16:32], generator.integers(-149, 128, (16, 64))), 1),
        "near the top": (signs[32:] * (2 - 2.0 ** -generator.integers(1, 24, (16, 64))), 1),
        "ties": (generator.integers(-600, 600, (16, 64)) / np.exp2(generator.integers(0, 4, (16, 1))), 1),
        "special": (_special(generator), 1),
    }
    return {name: (np.asarray(x, np.float32), axis) for name, (x, axis) in tensors.items()}


def _mantissas(generator: np.random.Generator) -> Array:
    return generator.uniform(1, 2, (16, 64)) * np.exp2(generator.integers(-12, 1, (16, 64)))


def _special(generator: np.random.Generator) -> Array:
    x = generator.normal(size=(18, 64)).astype(np.float32)
    x[0], x[1], x[2, ::2] = 0.0, -0.0, -0.0
    x[3, 3], x[4, 5], x[5, 7], x[6] = np.nan, np.inf, -np.inf, np.nan
    x[7], x[8, ::3] = 1e-40, 1e-42
    x[9] *= 1e-38
    x[10] *= 5e37
    x[11, 0], x[12, 1] = 3.4028235e38, -3.4028235e38
    x[13] *= 1e-44
    x[14, 2:4] = 1e-45, -1e-45
    x[15] = -1e-45
    x[15, 0], x[16] = 256.0, -1e-30
    x[16, 1], x[17, 40], x[17, 41] = 2e30, np.inf, np.nan
    return x


def model(op: str, attributes: dict[str, Any], axis: int, shape: tuple[int, ...]) -> Any:
    """One node in AMD's domain."""
    from onnx import TensorProto, helper

    node = helper.make_node(op, ["x"], ["y"], "node", domain=DOMAIN, axis=axis, **attributes)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def pair_model(kind: str, scale: float, shape: tuple[int, ...]) -> Any:
    """AMD's quantize and dequantize operators."""
    from onnx import TensorProto, helper

    ends = ["s", "z"]
    nodes = [
        helper.make_node("ExtendedQuantizeLinear", ["x", *ends], ["q"], "quantize", domain=DOMAIN),
        helper.make_node("ExtendedDequantizeLinear", ["q", *ends], ["y"], "dequantize", domain=DOMAIN),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    constants = [
        helper.make_tensor("s", TensorProto.FLOAT, [], [scale]),
        helper.make_tensor("z", getattr(TensorProto, kind), [], [0.0]),
    ]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def library_session(proto: Any, library: str) -> Session:
    """The bare form, run by Quark's library."""
    import onnxruntime as ort  # type: ignore[import-untyped]

    options = ort.SessionOptions()
    options.register_custom_ops_library(library)
    return ort.InferenceSession(proto.SerializeToString(), options)


def function_session(proto: Any) -> Session:
    """The same with Roundel's function body, and no library."""
    import onnx_ir as ir
    import onnxruntime as ort

    from roundel.qdq.functions import attach

    with_body = ir.to_proto(attach(ir.from_proto(proto)))
    return ort.InferenceSession(with_body.SerializeToString())


def write_golden(path: Path, library: str) -> None:
    """Inputs, and Quark's outputs for each format and variant; JSON says what is what."""
    tensors = golden_tensors()
    cases = {**FORMATS, **VARIANTS}
    arrays: dict[str, Array] = {f"x{i}": x for i, (x, _) in enumerate(tensors.values())}
    for c, (op, attributes) in enumerate(cases.values()):
        for i, (x, axis) in enumerate(tensors.values()):
            session = library_session(model(op, attributes, axis, x.shape), library)
            arrays[f"y{c}_{i}"] = session.run(None, {"x": x.copy()})[0]
    for p, (kind, scale) in enumerate(PAIRS):
        for i, (x, _) in enumerate(tensors.values()):
            session = library_session(pair_model(kind, scale, x.shape), library)
            arrays[f"p{p}_{i}"] = session.run(None, {"x": x.copy()})[0]
    listed = {
        "tensors": [{"name": name, "axis": axis} for name, (_, axis) in tensors.items()],
        "cases": [{"name": n, "op": op, "attributes": a} for n, (op, a) in cases.items()],
        "pairs": [{"type": kind, "scale": scale} for kind, scale in PAIRS],
    }
    arrays["index"] = np.frombuffer(json.dumps(listed).encode(), np.uint8)
    np.savez_compressed(path, **arrays)


def numerics(op: str, attributes: dict[str, Any], axis: int) -> Callable[[Array], Array]:
    """Roundel's own computation of a node."""
    import onnx_ir as ir

    from roundel.qdq.functions.blocks import read_format

    attrs = ir.convenience.convert_attributes(attributes)
    form = read_format(ir.Node(DOMAIN, op, [], attributes=attrs, num_outputs=1))
    return lambda x: form.apply(x, axis)


def compare_forms(preset: str, path: Path, images: Array, library: str) -> dict[str, Any]:
    """A model quantized by Roundel: do both forms give the same outputs, and how far are they from float?"""
    import onnx_ir as ir
    import onnxruntime as ort

    import roundel
    from roundel.qdq.functions import strip

    result = roundel.quantize(path, recipe=preset, data=[image[None] for image in images[:1]])
    protos = {"function": result.model, "bare": ir.to_proto(strip(result.ir))}
    exact = ort.InferenceSession(str(path))
    name = exact.get_inputs()[0].name
    wanted = np.concatenate([exact.run(None, {name: image[None]})[0] for image in images])
    outputs: dict[str, Array] = {}
    loads: dict[str, float] = {}
    levels = {"none": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC", "all": "ORT_ENABLE_ALL"}
    for form, proto in protos.items():
        for level, word in levels.items():
            options = ort.SessionOptions()
            options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, word)
            if form == "bare":
                options.register_custom_ops_library(library)
            start = time.perf_counter()
            session = ort.InferenceSession(proto.SerializeToString(), options)
            loads[f"{form} {level}"] = time.perf_counter() - start
            runs = [session.run(None, {name: image[None]})[0] for image in images]
            outputs[f"{form} {level}"] = np.concatenate(runs)
    noise = float(((outputs["function all"].astype(np.float64) - wanted) ** 2).sum())
    return {
        "format": preset,
        "images": len(images),
        "equal": {
            level: bool(np.array_equal(*(outputs[f"{f} {level}"].view(np.uint32) for f in protos)))
            for level in levels
        },
        "load_s": loads,
        "sqnr_db": 10 * math.log10(float((wanted.astype(np.float64) ** 2).sum()) / noise),
    }


def timed(call: Callable[[], Array]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(name: str, where: tuple[str, tuple[int, ...], int], library: str, repeat: int) -> dict[str, Any]:
    """One format on one tensor: nanoseconds for each value, in turns, and whether all three agree."""
    (op, attributes), (title, shape, axis) = FORMATS[name], where
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    proto = model(op, attributes, axis, shape)
    theirs, bodies = library_session(proto, library), function_session(proto)
    ours = numerics(op, attributes, axis)
    calls: dict[str, Callable[[], Array]] = {
        "quark": lambda: theirs.run(None, {"x": x})[0],
        "roundel": lambda: ours(x),
        "function": lambda: bodies.run(None, {"x": x})[0],
    }
    bits = {key: np.asarray(call()).view(np.uint32) for key, call in calls.items()}
    times: dict[str, list[float]] = {key: [] for key in calls}
    for turn in range(repeat):
        order = list(calls)[turn % 3 :] + list(calls)[: turn % 3]
        for key in order:
            times[key].append(timed(calls[key]) / x.size * 1e9)
    return {
        "format": name,
        "tensor": title,
        "shape": list(shape),
        "axis": axis,
        "ns": times,
        "median": {key: statistics.median(values) for key, values in times.items()},
        "min": {key: min(values) for key, values in times.items()},
        "equal": all(np.array_equal(bits["quark"], other) for other in bits.values()),
    }


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True, help="Quark's custom-op library")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--golden", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--images", type=Path, help="npz with images in an array named x, for --model")
    args = parser.parse_args()
    import torch  # type: ignore[import-not-found] # noqa: F401  the library needs torch's own

    if args.golden:
        write_golden(args.golden, args.library)
        rows = []
    elif args.model:
        images = np.load(args.images)["x"][:4]
        rows = [compare_forms(name, args.model, images, args.library) for name in WHOLE]
    else:
        rows = [measure(name, where, args.library, args.repeat) for name in FORMATS for where in SHAPES]
    emit({"rows": rows})


if __name__ == "__main__":
    main()
