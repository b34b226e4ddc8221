"""BF16: what the Ryzen AI compiler's own conversion does to a model's outputs, shown before it is compiled.

python examples/bf16/quantize.py                              # the embedded digits
python examples/bf16/quantize.py --model model.onnx --data inputs.npz
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import roundel
from roundel.example import load_example
from table import show

FORMS = {
    "bf16": "AMD's operators, with bodies: runs without a library",
    "bf16_cast": "Cast to bfloat16 and back",
    "vaiml_bf16": "rounded constants only: the compiler does the rest",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="float model; the embedded digits when not given")
    parser.add_argument("--data", type=Path, help="samples: outputs of both models are compared on them")
    args = parser.parse_args()
    example = load_example()
    model = args.model or example.model_path
    data = args.data or example.calibration
    rows = [("float", "", f"{model.stat().st_size / 1e3:.1f} KB", "", "")]
    with tempfile.TemporaryDirectory() as folder:
        for preset, what in FORMS.items():
            for half in (False, True):
                target = Path(folder) / f"{preset}{half}.onnx"
                changes = {"output": {"half_weights": half}}
                result = roundel.quantize(model, target, recipe=preset, data=data, changes=changes)
                out = result.record.outputs[0]
                name = preset + (", 16-bit constants" if half else "")
                size = f"{target.stat().st_size / 1e3:.1f} KB"
                rows.append((name, what, size, f"{out.sqnr_db:.1f} dB", f"{out.cosine:.6f}"))
    show(("preset", "form", "size", "SQNR of the output", "cosine"), rows)


if __name__ == "__main__":
    main()
