"""How much of the error goes away when the worst three layers get 16-bit activations, on held-out samples.

usage: python bench/sensitivity.py MODEL.onnx CALIBRATION.npz EVALUATION.npz
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import roundel
from roundel.measure.layers import Sensitivity
from roundel.model.session import open_session
from roundel.numerics.metrics import Closeness

PRESETS = ("a8w8_minmax", "a8w8")
WORST = 3


def main(model: str, calibration: str, evaluation: str) -> None:
    """Print a Markdown table with one line for each preset."""
    images = np.load(evaluation)["x"]
    float_session = open_session(Path(model))
    name = float_session.get_inputs()[0].name
    wanted = [float_session.run(None, {name: images[i : i + 1]})[0] for i in range(len(images))]

    def error(recipe: str, changes: dict[str, Any]) -> Closeness:
        result = roundel.quantize(model, recipe=recipe, data=calibration, changes=changes)
        session = open_session(result.ir, simulate=True)
        total = Closeness()
        for index, reference in enumerate(wanted):
            total = total.merge(
                Closeness.of(reference, session.run(None, {name: images[index : index + 1]})[0])
            )
        return total

    print("| preset, effort none | as it is | worst three in A16W8 | error power won back | seconds |")
    print("|---|---|---|---|---|")
    for preset in PRESETS:
        found: Sensitivity = roundel.sensitivity(
            model, recipe=preset, data=calibration, changes={"effort": "none"}
        )
        overrides = [{"nodes": list(layer.nodes), "type": "int16"} for layer in found.layers[:WORST]]
        before = error(preset, {"effort": "none"})
        after = error(preset, {"effort": "none", "overrides": overrides})
        won = 1 - after.noise / before.noise
        cells = (
            preset,
            f"{before.sqnr_db:.1f} dB",
            f"{after.sqnr_db:.1f} dB",
            f"{won:.0%}",
            f"{found.seconds:.1f}",
        )
        print("| " + " | ".join(cells) + " |")
        for layer in found.layers[:WORST]:
            print("   ", layer.name, f"{layer.share:.1%}", layer.won_back, file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
