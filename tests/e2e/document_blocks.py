"""Runs the Python blocks of one document in order, with paths, reader and loader filled in.

Called as `python -m roundel.quark document_blocks.py DOCUMENT FOLDER`, where `quark.onnx` is Roundel. Blocks
of one document share their names, as a reader who types them one by one has it; a block that only makes a
config is followed by the call that quantizes with it. Every model is written to FOLDER as NUMBER.onnx.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import numpy as np
from onnxruntime.quantization.calibrate import CalibrationDataReader, CalibrationMethod
from quark.onnx import (  # type: ignore[import-not-found]
    ExtendedQuantFormat,
    ExtendedQuantType,
    ModelQuantizer,
    PowerOfTwoMethod,
    QuantType,
)
from quark.onnx.quantization.config.config import Config, QuantizationConfig  # type: ignore[import-not-found]
from quark.onnx.quantization.config.custom_config import (  # type: ignore[import-not-found]
    DEFAULT_ADAROUND_PARAMS,
)

SAMPLES = 6
INPUT = "x"
SHAPE = (1, 3, 8, 8)


def images() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.normal(0, 1, SHAPE).astype(np.float32) for _ in range(SAMPLES)]


class Reader(CalibrationDataReader):
    """What the documents leave to the reader."""

    def __init__(self) -> None:
        self.left = iter({INPUT: image} for image in images())

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.left, None)


def blocks(text: str) -> list[str]:
    """The Python blocks: fenced ones, and those of code directives; what is no Python is left out."""
    found = re.findall(r"```python\n(.*?)```", text, re.S)
    found += re.findall(r"^\.\. code(?:-block)?::(?: python)?\n\n((?:(?: +.*)?\n)+)", text, re.M)
    if not found:  # a page without any markup: a block is what stands between words and 'The user can'
        found = re.findall(r"^(\w+ = \w+\(.*?\n)(?=\n\w)", text, re.M | re.S)
    return [block for block in map(straightened, found) if is_python(block)]


def straightened(block: str) -> str:
    """Without the indentation of the page, which for some lines is one space more than for others."""
    lines = textwrap.dedent(block).splitlines()
    uneven = [line[1:] if line.startswith(" ") and not line.startswith("  ") else line for line in lines]
    if not is_python("\n".join(lines)):
        lines = [line[1:] if (len(line) - len(line.lstrip())) % 4 == 1 else line for line in uneven]
    return "\n".join(lines)


def is_python(block: str) -> bool:
    try:
        compile(block, "block", "exec")
    except SyntaxError:
        return False
    return True


def filled_in(block: str, folder: Path, number: int) -> str:
    """Paths and the reader's body; nothing else changes."""
    here = {
        "path/to/float_model.onnx": folder / "float.onnx",
        "path/to/quantized_model.onnx": folder / f"{number}.onnx",
        "path/to/calibration_data": folder,
        "float32_model.onnx": folder / "float.onnx",
        "baseline_results": folder / "baseline_results",
        "'model_input_name'": repr(INPUT),
    }
    for words, path in here.items():
        block = block.replace(words, str(path))
    return block.replace("processed_data = []", "processed_data = images()")


def main(document: Path, folder: Path) -> None:
    names: dict[str, object] = {
        **{item.__name__: item for item in (CalibrationMethod, PowerOfTwoMethod, QuantType, ModelQuantizer)},
        **{item.__name__: item for item in (ExtendedQuantFormat, ExtendedQuantType)},
        **{item.__name__: item for item in (Config, QuantizationConfig)},
        "DEFAULT_ADAROUND_PARAMS": DEFAULT_ADAROUND_PARAMS,
        "images": images,
    }
    for number, block in enumerate(blocks(document.read_text(encoding="utf-8"))):
        target = folder / f"{number}.onnx"
        names.update(
            input_model_path=str(folder / "float.onnx"),
            output_model_path=str(target),
            data_reader=Reader(),
            input_data_loader=images(),
            onnx_model_path=str(max(folder.glob("[0-9]*.onnx"), default=folder / "float.onnx")),
        )
        before = {key: id(value) for key, value in names.items()}
        exec(compile(filled_in(block, folder, number), f"block {number}", "exec"), names)
        made = [v for k, v in names.items() if id(v) != before.get(k) and isinstance(v, QuantizationConfig)]
        if made and not target.exists():
            config = Config(global_quant_config=made[-1])
            ModelQuantizer(config).quantize_model(str(folder / "float.onnx"), str(target), Reader())
        print(f"block {number}: {'model' if target.exists() else 'ran'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
