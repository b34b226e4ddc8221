"""The kit's README: the steps, and the traps that apply to this model on this device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roundel.check.number_format import Recognised
from roundel.deploy.provider import CONFIG_FILE
from roundel.targets.devices import Device, Format


@dataclass(frozen=True, slots=True)
class Trap:
    """Something that goes wrong without a message.

    Attributes:
        title: in a few words.
        text: what happens and what to do.
        applies: whether it concerns this format on this device.
    """

    title: str
    text: str
    applies: Callable[[Format, Device], bool] = lambda kind, device: True


TRAPS = (
    Trap(
        "Silent CPU fallback",
        "The session opens and the results are right, yet nothing ran on the NPU. Always look at the report: "
        "`python run.py --report`, then `roundel npu-report`. With `--require-npu`, a missing provider is an "
        "error.",
    ),
    Trap(
        "Timings of the first session",
        "The first session compiles the model, for minutes where it is large; later ones load `cache/`. The "
        "provider prints its placement lines when it compiles, and not always when it loads a cached model.",
    ),
    Trap(
        "A cache outlives what it was made with",
        "Delete `cache/` after an update of the driver or of Ryzen AI. A changed model gets a new cache key.",
    ),
    Trap(
        "Old option names",
        "`cacheDir` and `cacheKey` are old spellings that still circulate and break; the names are "
        "`cache_dir` and `cache_key`.",
    ),
    Trap(
        "Fixed batch",
        "Batch 1, or an open batch dimension. A model with a fixed batch of 8 is not taken.",
    ),
    Trap(
        "xclbin",
        "Must not be set on this device since Ryzen AI 1.6; examples for older versions set it.",
        lambda kind, device: kind.integer and not device.needs_xclbin,
    ),
    Trap(
        "xclbin",
        "Must be set on this device. `provider_options.json` has the usual place; if Ryzen AI is elsewhere, "
        "use `--xclbin PATH` or the variable `ROUNDEL_XCLBIN`. The script stops when the file is missing.",
        lambda kind, device: device.needs_xclbin,
    ),
    Trap(
        "Rounding",
        "Ryzen AI 1.7 and newer round half to even; this device needs `xlnx_enable_py3_round=0` (it is set).",
        lambda kind, device: device.needs_xclbin,
    ),
    Trap(
        "Small models",
        "The integer flow offloads nothing when the model has fewer than 2 Conv nodes.",
        lambda kind, device: kind.integer,
    ),
    Trap(
        "Which 16-bit Q/DQ",
        "AMD does not document which form the compiler takes (com.microsoft, opset 21, com.amd.quark). If "
        "nothing is offloaded, quantize again with `-s output.opset=21 -s placement.domain=ai.onnx`.",
        lambda kind, device: kind is Format.A16W8,
    ),
    Trap(
        "BF16 needs a compiled cache",
        "The deployment package cannot compile BF16 on the fly: run once in the full Ryzen AI environment, "
        "then ship `cache/` with this folder. Compiling large models takes 32 GB of memory.",
        lambda kind, device: not kind.integer,
    ),
    Trap(
        "The BF16 compiler's options",
        f"`optimize_level` in `{CONFIG_FILE}` (1 to 3) trades compile time for speed, often by a large "
        "factor. Ryzen AI 1.4 also needs `enable_f32_to_bf16_conversion: true` there for a float32 model.",
        lambda kind, device: not kind.integer,
    ),
    Trap(
        "Wrong values in BF16",
        "Reported for models with several outputs and with PRelu: compare the outputs with those of `--cpu`.",
        lambda kind, device: not kind.integer,
    ),
    Trap(
        "bfloat16 tensors",
        "Graphs with tensors of type bfloat16 were refused in one report; pairs of casts are taken. If this "
        "model is refused, deploy the float32 model: the compiler converts it itself.",
        lambda kind, device: kind is Format.BF16,
    ),
)

_STEPS = """\
## Steps

1. Copy this folder to the machine and activate the Ryzen AI environment (its Python has the provider).
2. Look at the CPU's result first, as the reference: `python run.py --input x.npy --cpu --save cpu.npz`
3. Run on the NPU and ask for the placement: `python run.py --input x.npy --report --save npu.npz`
4. Read the placement: `roundel npu-report cache/*/vitisai_ep_report.json`
5. Measure: `python run.py --input x.npy --iterations 100 --require-npu`

Where the provider is missing, `run.py` says so and uses the CPU. `--input` takes a `.npy` file or a `.npz`
file with one array for each input; without it, the input is random.
"""


def readme(model: str, recognised: Recognised, device: Device, notes: tuple[str, ...]) -> str:
    """The text of the kit's README."""
    kind = recognised.format
    config = [] if kind.integer else [f"- `{CONFIG_FILE}`: the BF16 compiler's configuration"]
    remarks = ["## About this model", "", *(f"- {note}" for note in notes), ""] if notes else []
    traps = [f"- **{trap.title}.** {trap.text}" for trap in TRAPS if trap.applies(kind, device)]
    return "\n".join(
        [
            f"# {_plain(model)} on {device.name} ({device.processors})",
            "",
            f"Format: {kind.name} ({recognised.reason}).",
            "",
            "- `model.onnx`: the model, with its weights' files where it has any",
            "- `provider_options.json`: options of ONNX Runtime's VitisAIExecutionProvider",
            *config,
            "- `run.py`: runs the model; needs only onnxruntime and numpy",
            "- `kit.json`: what Roundel wrote here, with checksums",
            "",
            _STEPS,
            *remarks,
            "## What goes wrong without a message",
            "",
            *traps,
            "",
        ]
    )


def _plain(text: str) -> str:
    return "".join(c if c.isalnum() or c in " ._-+" else "_" for c in text)
