"""Run the model of this folder on the Ryzen AI NPU, or on the CPU where there is none.

Needs onnxruntime (the one from AMD's Ryzen AI environment, for the NPU) and numpy; nothing else.

    python run.py --random                     a first run
    python run.py --input image.npy            one array (or a .npz with one array for each input name)
    python run.py --random --iterations 100    latency
    python run.py --random --report            which operators went to the NPU
    python run.py --input image.npy --cpu      the reference: the same model on the CPU
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnxruntime as ort

HERE = Path(__file__).resolve().parent
MODEL = HERE / "model.onnx"
OPTIONS = HERE / "provider_options.json"
NPU = "VitisAIExecutionProvider"
CPU = "CPUExecutionProvider"
REPORT_VARIABLE = "XLNX_ONNX_EP_REPORT_FILE"
FOLDERS_AND_FILES = ("cache_dir", "config_file")  # relative values are meant from this folder

DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(int16)": np.int16,
    "tensor(uint16)": np.uint16,
    "tensor(int32)": np.int32,
    "tensor(uint32)": np.uint32,
    "tensor(int64)": np.int64,
    "tensor(uint64)": np.uint64,
    "tensor(bool)": np.bool_,
}


def main() -> None:
    """Open a session, run it, and say what came out and how long it took."""
    arguments = parse_arguments()
    session, options = open_session(arguments)
    if arguments.report:
        tell_report(arguments.report, options)
    feed = read_input(session, arguments.input) if arguments.input else random_input(session, arguments.seed)
    names = [output.name for output in session.get_outputs()]
    results, seconds = run(session, names, feed, arguments.iterations)
    for name, result in zip(names, results):  # noqa: B905 - Python 3.9 has no strict=
        tell_output(name, result)
    tell_latency(seconds)
    if arguments.save:
        save(arguments.save, names, results)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run this model on the Ryzen AI NPU, else on the CPU.")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--input", type=Path, help=".npy (one input) or .npz (one array per input name)")
    source.add_argument("--random", action="store_true", help="random input (the default)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random input")
    parser.add_argument("--iterations", type=int, default=1, help="timed runs, after one warm-up")
    parser.add_argument("--save", type=Path, help="write the outputs to this .npz file")
    parser.add_argument(
        "--report",
        nargs="?",
        const="vitisai_ep_report.json",
        help="have the provider write its operator assignment report under this name",
    )
    parser.add_argument("--xclbin", help="NPU binary (Phoenix and Hawk Point only)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--cpu", action="store_true", help="use the CPU even where there is an NPU")
    where.add_argument("--require-npu", action="store_true", help="stop instead of using the CPU")
    arguments = parser.parse_args()
    if arguments.iterations < 1:
        parser.error("--iterations must be at least 1")
    return arguments


def open_session(arguments: argparse.Namespace) -> tuple[Any, dict[str, str]]:
    """A session on the NPU when ONNX Runtime has AMD's provider, else on the CPU; and the options used."""
    options: dict[str, str] = {}
    if arguments.cpu:
        providers: list[Any] = [CPU]
    elif NPU in ort.get_available_providers():
        options = provider_options(arguments.xclbin)
        if arguments.report:
            os.environ[REPORT_VARIABLE] = arguments.report
        providers = [(NPU, options), CPU]
    else:
        missing = f"{NPU} is not available in this Python environment (onnxruntime {ort.__version__})."
        if arguments.require_npu:
            fail(missing)
        tell(f"note: {missing}\n      Falling back to {CPU}: timings say nothing about the NPU.")
        providers = [CPU]
    start = time.perf_counter()
    session = ort.InferenceSession(str(MODEL), providers=providers)
    used = session.get_providers()
    print(f"session: {', '.join(used)} ({time.perf_counter() - start:.1f} s to open)")
    if options and NPU not in used:
        dropped = f"ONNX Runtime dropped {NPU}; its messages above say why."
        if arguments.require_npu:
            fail(dropped)
        tell(f"note: {dropped} Everything runs on the CPU.")
    return session, options


def provider_options(xclbin: str | None) -> dict[str, str]:
    """The options of provider_options.json with paths made absolute and variables filled in."""
    options: dict[str, str] = json.loads(OPTIONS.read_text(encoding="utf-8"))
    for key in FOLDERS_AND_FILES:
        if key in options:
            options[key] = str(HERE / options[key])
    if "xclbin" in options:
        options["xclbin"] = found_xclbin(xclbin or os.environ.get("ROUNDEL_XCLBIN") or options["xclbin"])
    elif xclbin:
        fail("--xclbin is for Phoenix and Hawk Point only; on this device it must not be set.")
    return options


def found_xclbin(text: str) -> str:
    """The NPU binary's path, which must exist: without it the provider leaves everything on the CPU."""
    filled = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), text)
    if not Path(filled).is_file():
        fail(
            f"the NPU binary does not exist: {filled}\n"
            "       Give --xclbin PATH, or set ROUNDEL_XCLBIN or RYZEN_AI_INSTALLATION_PATH."
        )
    return filled


def random_input(session: Any, seed: int) -> dict[str, Any]:
    """Random values for every input; open dimensions become 1."""
    generator = np.random.default_rng(seed)
    feed: dict[str, Any] = {}
    for spec in session.get_inputs():
        shape = [size if isinstance(size, int) and size > 0 else 1 for size in spec.shape]
        dtype = np.dtype(element_type(spec))
        if dtype.kind == "f":
            feed[spec.name] = generator.standard_normal(shape).astype(dtype)
        else:
            feed[spec.name] = generator.integers(0, 2, shape).astype(dtype)
    print("input: random")
    return feed


def read_input(session: Any, path: Path) -> dict[str, Any]:
    """The arrays of a .npy or .npz file, checked against the model's inputs."""
    specs = {spec.name: spec for spec in session.get_inputs()}
    try:
        loaded = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        fail(f"cannot read {path}: {error}")
    if isinstance(loaded, np.ndarray):
        if len(specs) != 1:
            fail(f"the model has {len(specs)} inputs ({', '.join(specs)}): give a .npz with these names")
        arrays = {next(iter(specs)): loaded}
    else:
        with loaded:
            arrays = {name: loaded[name] for name in loaded.files}
    absent, unknown = sorted(set(specs) - set(arrays)), sorted(set(arrays) - set(specs))
    if absent or unknown:
        fail(
            f"{path} lacks {absent or 'nothing'} and has {unknown or 'nothing'} that the model does not know"
        )
    print(f"input: {path}")
    return {name: fitted(specs[name], array) for name, array in arrays.items()}


def fitted(spec: Any, array: Any) -> Any:
    """The array in the input's type, with a batch axis where only that was missing."""
    if array.ndim == len(spec.shape) - 1:
        array = array[np.newaxis]
    sizes = list(zip(spec.shape, array.shape))  # noqa: B905 - Python 3.9 has no strict=
    if array.ndim != len(spec.shape) or any(isinstance(want, int) and want != got for want, got in sizes):
        fail(f"input '{spec.name}' has shape {list(array.shape)}, the model takes {spec.shape}")
    return np.ascontiguousarray(array, dtype=element_type(spec))


def element_type(spec: Any) -> Any:
    """The numpy type of an input."""
    if spec.type not in DTYPES:
        fail(f"input '{spec.name}' is a {spec.type}, which this script cannot feed")
    return DTYPES[spec.type]


def run(
    session: Any, names: list[str], feed: dict[str, Any], iterations: int
) -> tuple[list[Any], list[float]]:
    """One warm-up run, then the timed ones: the last outputs, and the seconds of each."""
    session.run(names, feed)
    seconds = []
    results: list[Any] = []
    for _ in range(iterations):
        start = time.perf_counter()
        results = session.run(names, feed)
        seconds.append(time.perf_counter() - start)
    return results, seconds


def tell_output(name: str, result: Any) -> None:
    """Shape and statistics of an output; the largest entries where it reads as class scores."""
    array = np.asarray(result)
    print(f"output {name}: {array.dtype} {list(array.shape)}")
    if array.size == 0 or array.dtype.kind not in "fiu":
        return
    values = array.astype(np.float64)
    print(
        f"  min {values.min():.6g}  max {values.max():.6g}  mean {values.mean():.6g}  std {values.std():.6g}"
    )
    broken = int(np.count_nonzero(~np.isfinite(values)))
    if broken:
        tell(f"warning: {broken} of {values.size} values of '{name}' are NaN or infinite")
    scores = values[0].reshape(-1) if values.ndim > 1 else values.reshape(-1)
    if scores.size > 1 and scores.size == values.shape[1 if values.ndim > 1 else 0]:
        best = np.argsort(-scores, kind="stable")[:5]
        print(f"  top-{len(best)}: " + ", ".join(f"{index} ({scores[index]:.4g})" for index in best))


def tell_latency(seconds: list[float]) -> None:
    """Timings in milliseconds."""
    ordered = sorted(1000 * each for each in seconds)
    p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    print(
        f"latency: median {statistics.median(ordered):.3f} ms, min {ordered[0]:.3f}, p90 {p90:.3f},"
        f" max {ordered[-1]:.3f} ({len(ordered)} runs)"
    )


def tell_report(name: str, options: dict[str, str]) -> None:
    """Where the assignment report is. The provider writes it into the cache folder, some into the current."""
    if not options:
        tell("note: no report: only the NPU provider writes one.")
        return
    cache = Path(options["cache_dir"])
    for folder in (cache / options["cache_key"], cache, Path.cwd()):
        if (folder / name).is_file():
            print(f"report: {folder / name}\n        roundel npu-report '{folder / name}'")
            return
    tell(f"note: no {name} was written. Delete {cache} and run again: a cached model may not report.")


def save(path: Path, names: list[str], results: list[Any]) -> None:
    """Outputs as .npz. Written by hand: numpy.savez cannot take an output that is called 'file'."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, result in zip(names, results):  # noqa: B905 - Python 3.9 has no strict=
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(result), allow_pickle=False)
    print(f"saved: {path}")


def tell(text: str) -> None:
    """A remark for people, kept apart from the results."""
    print(text, file=sys.stderr)


def fail(text: str) -> NoReturn:
    """Stop with a message."""
    tell(f"error: {text}")
    sys.exit(2)


if __name__ == "__main__":
    main()
