"""The behaviour lock: model x preset -> what the run writes, as hashes of its plan and of its file.

    python tests/golden/behaviour.py --check         # compare with behaviour.json, list what differs
    python tests/golden/behaviour.py --regenerate    # the only way to change behaviour.json

A plan depends on the model and the recipe alone. The bytes of a file also depend on the arithmetic of ONNX
Runtime and of numpy's BLAS on one kind of processor: they are compared only where those are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("behaviour.json")
SHARED = Path(__file__).parents[3] / "shared"
sys.path.insert(0, str(Path(__file__).parents[1]))

HEADLINE = ("xint8", "a8w8", "a16w8", "bf16", "xint8_plain", "a8w8_minmax", "a16w8_minmax")
GRAPHS = 40
# Network -> mean and standard deviation of its input, its size, and how many images it sees.
IMAGENETS = {"mobilenet_v2_imagenet": (224, 5), "ssdlite_mobilenet_v2_coco": (300, 5)}
CIFARS = {
    "cifar10_resnet20": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 32),
    "mobilenet_v2": ((0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.262), 64),
    "mobilenet_v3_small": ((0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.262), 64),
    "vit": ((0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.262), 64),
}

Made = tuple[Any, list[dict[str, Any]]]


def short(text: bytes | str) -> str:
    """A hash that fits on a line."""
    data = text.encode() if isinstance(text, str) else text
    return hashlib.sha256(data).hexdigest()[:16]


def plan_text(plan: Any) -> str:
    """One line for each node and tensor: small enough to read in a difference."""
    lines = ["nodes"]
    lines += [f"  {n.name} [{n.op}]: {n.reason}" for n in plan.nodes.values()]
    lines += ["", "tensors"]
    for t in plan.tensors.values():
        lines.append(f"  {t.name}: {t.role.value}, {t.scheme}; {t.source}; by {t.decided_by}: {t.reason}")
    lines += ["", "kept in float"]
    lines += [f"  {name}: {why}" for name, why in plan.kept_float.items()]
    lines += ["", f"folded: {', '.join(plan.folded) or 'none'}", ""]
    return "\n".join(lines)


@cache
def place() -> str:
    """What the bytes of a file depend on beside Roundel."""
    import numpy as np
    import onnxruntime

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), platform.processor())
    return f"onnxruntime {onnxruntime.__version__}, numpy {np.__version__}, cpu {short(flags)}"


def _example() -> Made:
    from roundel.example import load_example

    found = load_example()
    return str(found.model_path), found.calibration[:16]


def _operator(name: str) -> Made:
    from ops.operator_cases import CASES

    case = next(c for c in CASES if c.name == name)
    return case.model(), case.data(6)


def _generated(seed: str) -> Made:
    from helpers import feeds
    from random_graphs import random_graph

    model = random_graph(random.Random(int(seed)).choice)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    return model, feeds(shapes, 6)


def _real(name: str) -> Made:
    import numpy as np
    import onnx
    from PIL import Image

    path = SHARED / "models" / f"{name}.onnx"
    entry = onnx.load(path, load_external_data=False).graph.input[0].name
    if name in CIFARS:
        mean, std, size = CIFARS[name]
        pictures = [Image.fromarray(x) for x in np.load(SHARED / "data/cifar10/calib.npz")["x"][:12]]
        shift, scale = np.array(mean), np.array(std)
    else:
        size, count = IMAGENETS[name]
        files = sorted((SHARED / "data/imagenet/calib").glob("*.jpg"))[:count]
        pictures = [Image.open(file).convert("RGB") for file in files]
        shift, scale = np.array(0.5), np.array(0.5)
    arrays = [np.asarray(p.resize((size, size), Image.Resampling.BILINEAR)) / 255.0 for p in pictures]
    return str(path), [
        {entry: ((a - shift) / scale).transpose(2, 0, 1)[None].astype(np.float32)} for a in arrays
    ]


MAKERS: dict[str, Callable[[str], Made]] = {
    "example": lambda _: _example(),
    "operator": _operator,
    "graph": _generated,
    "real": _real,
}


def presets_of(group: str) -> tuple[str, ...]:
    """What a group of models is quantized with."""
    if group != "example":
        return HEADLINE
    import roundel

    tuned = ("_adaround", "_adaquant")
    return tuple(name for name in roundel.preset_names() if not name.endswith(tuned))


def models_of(group: str) -> tuple[str, ...]:
    """The models of a group."""
    if group == "operator":
        from ops.operator_cases import CASES

        return tuple(case.name for case in CASES)
    if group == "real":
        return (*CIFARS, *IMAGENETS)
    return ("digits",) if group == "example" else tuple(str(seed) for seed in range(GRAPHS))


def cases() -> Iterator[tuple[str, str, str]]:
    """Group, model and preset of every line."""
    for group in MAKERS:
        if group == "real" and not (SHARED / "models").is_dir():
            continue
        for model in models_of(group):
            for preset in presets_of(group):
                yield group, model, preset


def observed(case: tuple[str, str, str]) -> tuple[str, str]:
    """Hashes of the plan and of the file; a refusal counts by the first line of its text."""
    import roundel

    group, name, preset = case
    model, data = MAKERS[group](name)
    try:
        result = roundel.quantize(model, recipe=preset, data=data)
    except roundel.RoundelError as error:
        return short(str(error).splitlines()[0]), "refused"
    return short(plan_text(result.plan)), short(result.model.SerializeToString(deterministic=True))


def key(case: tuple[str, str, str]) -> str:
    """The name of a line."""
    return " ".join(case)


def load_table() -> dict[str, Any]:
    """Where it was made, and its lines."""
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def differences(chosen: list[tuple[str, str, str]], seen: list[tuple[str, str]]) -> list[str]:
    """What is not as the table has it."""
    table = load_table()
    same_place = table["place"] == place()
    found = []
    for case, (plan, file) in zip(chosen, seen, strict=True):
        wanted = table["lines"].get(key(case))
        if wanted is None:
            found.append(f"{key(case)}: not in the table")
        elif wanted[0] != plan:
            found.append(f"{key(case)}: the plan is another")
        elif same_place and wanted[1] != file:
            found.append(f"{key(case)}: the file is another")
    return found


def main() -> int:
    """Compare or regenerate the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true")
    mode.add_argument("--regenerate", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    chosen = [case for case in cases() if asked.only in key(case)]
    with ProcessPoolExecutor(asked.jobs) as pool:
        seen = list(pool.map(observed, chosen, chunksize=4))
    if asked.check:
        found = differences(chosen, seen)
        print(*found, sep="\n")
        print(f"{len(chosen) - len(found)} of {len(chosen)} lines as they were")
        return 1 if found else 0
    lines = load_table()["lines"] if asked.only and TABLE.exists() else {}
    lines |= {key(case): list(hashes) for case, hashes in zip(chosen, seen, strict=True)}
    rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in lines.items())
    TABLE.write_text(f'{{"place": {json.dumps(place())},\n "lines": {{\n{rows}\n}}}}\n', encoding="utf-8")
    print(f"{len(chosen)} lines written")
    return 0


if __name__ == "__main__":
    # Small products only: with more threads the pool's processes would fight for the processor.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    sys.exit(main())
