"""Options that several commands share, declared once; and what turns their words into values."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar

import typer

from roundel.errors import RecipeError

if TYPE_CHECKING:
    from rich.console import Console

    from roundel.data import RandomSpec
    from roundel.report.progress import Listeners

LOG: ContextVar[TextIO | None] = ContextVar("log", default=None)
"""What --log-file has opened, for the command behind it."""

Words = dict[str, Any]
"""What the user said in several options, under the names that Roundel's functions have for it."""

TreeT = TypeVar("TreeT")

_DATA, _IMAGES, _WORK = "Data", "Images", "Long runs"


def option(text: str, *names: str, panel: str | None = None) -> Any:
    """An option: what it is for, its names where they are not the parameter's, and where --help lists it."""
    return typer.Option(*names, help=text, rich_help_panel=panel)


def argument(text: str, metavar: str | None = None) -> Any:
    """What stands without a name."""
    return typer.Argument(help=text, show_default=False, metavar=metavar)


Model = Annotated[Path, argument("The float ONNX model.")]
EitherModel = Annotated[Path, argument("An ONNX model, float or quantized.")]
Output = Annotated[Path, option("The file to write.", "--output", "-o")]
Preset = Annotated[
    str | None, option("Preset name, a8w8 if not given; see `roundel presets`.", "--preset", "-p")
]
RecipeFile = Annotated[
    Path | None, option("A recipe file (YAML or JSON) instead of a preset.", "--recipe", "-r")
]
Exclude = Annotated[
    list[str] | None,
    option("Keep in float: a node or tensor name, a glob, re:REGEX or op:TYPE.", "--exclude", "-x"),
]
Include = Annotated[list[str] | None, option("Quantize only these (same words as --exclude).")]
ExcludeSubgraph = Annotated[list[str] | None, option("Keep in float all between tensors: 'a,b->c,d'.")]
FixInputs = Annotated[
    list[str] | None, option("Make an input a constant: NAME=VALUE, for example sr=16000.", "--fix-input")
]
Set = Annotated[
    list[str] | None, option("Change a recipe value, for example -s weights.per_channel=true.", "--set", "-s")
]
Report = Annotated[Path | None, option("Also write one HTML page with all of it.")]
EvalData = Annotated[
    Path | None, option("Also judge both models on these: accuracy before and after.", panel="Judging")
]
EvalLabels = Annotated[
    str | None,
    option("Of --eval-data: class numbers, 'folders', 're:REGEX' or boxes; see `evaluate`.", panel="Judging"),
]
EvalTask = Annotated[str, option("Of --eval-data: classification or detection.", panel="Judging")]
Mean = Annotated[str | None, option("Per channel, e.g. 0.5,0.5,0.5", panel=_IMAGES)]
Std = Annotated[str | None, option("Per channel.", panel=_IMAGES)]
Scale = Annotated[str | None, option("unit (pixels / 255, the default) or raw.", panel=_IMAGES)]
Resize = Annotated[str | None, option("Short side, or HEIGHTxWIDTH.", panel=_IMAGES)]
Crop = Annotated[str | None, option("Centre crop: side, or HEIGHTxWIDTH.", panel=_IMAGES)]
Layout = Annotated[str | None, option("nchw or nhwc.", panel=_IMAGES)]
Bgr = Annotated[bool, option("Blue first.", "--bgr", panel=_IMAGES)]
Letterbox = Annotated[bool, option("Keep the aspect, with grey around.", "--letterbox", panel=_IMAGES)]
Samples = Annotated[int | None, option("Use at most this many.", panel=_DATA)]
AsNpu = Annotated[
    str | None, option("phx or hpt: compute Q/DQ models as that NPU's integers do (docs/npu.md).", "--as-npu")
]
Quiet = Annotated[bool, option("Print nothing.", "--quiet", "-q")]
Json = Annotated[bool, option("Print JSON instead of tables.", "--json")]


def takes(**shared: Callable[..., object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that functions declare; what they make of them reaches it as parameters.

    Args:
        shared: for a parameter of the command, the function: its signature is shown to typer in the
            parameter's place, and it is called with the user's words. An option that the command declares
            itself is shown as the command has it, and reaches both.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        offered = {name: inspect.signature(f, eval_str=True).parameters for name, f in shared.items()}
        shown: dict[str, inspect.Parameter] = {}
        for name, parameter in own.items():
            for option, declared in offered.get(name, {name: parameter}).items():
                shown[option] = own[option] if option in own and option not in offered else declared

        @functools.wraps(command)
        def run(**words: Any) -> None:
            made = {name: f(**{o: words[o] for o in offered[name]}) for name, f in shared.items()}
            command(**{name: words[name] for name in own if name not in made}, **made)

        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in shown.values()]
        )
        run.__annotations__ = {name: p.annotation for name, p in shown.items()}
        return run

    return decorated


def recipe_words(
    preset: Preset = None,
    recipe: RecipeFile = None,
    exclude: Exclude = None,
    include: Include = None,
    fix_inputs: FixInputs = None,
    settings: Set = None,
) -> Words:
    """Which recipe, and what differs from it."""
    return {
        "preset": preset,
        "recipe": recipe,
        "exclude": exclude or [],
        "include": include or [],
        "fix_inputs": fixed_inputs(fix_inputs),
        "changes": settings_tree(settings),
    }


def fixed_inputs(texts: list[str] | None) -> dict[str, Any] | None:
    """Constants by input name from --fix-input's words."""
    import yaml

    found: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        try:
            found[name.strip()] = _number(yaml.safe_load(value)) if equals and name.strip() else None
        except (yaml.YAMLError, ValueError):
            found[name.strip()] = None
        if found[name.strip()] is None:
            raise RecipeError(
                "--fix-input takes the name of an input and its value.",
                observed=text,
                expected="NAME=VALUE with a number, true, false or a list: sr=16000, size=[480, 640]",
            )
    return found or None


def _number(value: Any) -> Any:
    """YAML leaves 1e-3 a text."""
    if isinstance(value, list):
        return [_number(one) for one in value]
    return float(value) if isinstance(value, str) else value


def data_words(
    data: Annotated[
        Path | None, option("Folder of images, .npy or .npz files, or one .npy/.npz file.", panel=_DATA)
    ] = None,
    samples: Samples = None,
    random: Annotated[int | None, option("Use this many random samples.", panel=_DATA)] = None,
    shape: Annotated[
        list[str] | None, option("Shape of a random input: NAME=1x3x48x320.", panel=_DATA)
    ] = None,
    mean: Mean = None,
    std: Std = None,
    scale: Scale = None,
    resize: Resize = None,
    crop: Crop = None,
    layout: Layout = None,
    bgr: Bgr = False,
    letterbox: Letterbox = False,
) -> Words:
    """What the user says about the data."""
    if data is not None and random is not None:
        raise RecipeError(
            "Both --data and --random were given.",
            expected="one of them",
            hint="Use --data for a real result, --random for a first look.",
        )
    return {
        "data": data if random is None else random_data(random, shape),
        "samples": samples,
        **image_words(mean, std, scale, resize, crop, layout, bgr, letterbox),
    }


def image_words(
    mean: Mean = None,
    std: Std = None,
    scale: Scale = None,
    resize: Resize = None,
    crop: Crop = None,
    layout: Layout = None,
    bgr: Bgr = False,
    letterbox: Letterbox = False,
) -> Words:
    """How an image becomes the model's input."""
    return {
        "mean": _numbers(mean, "--mean"),
        "std": _numbers(std, "--std"),
        "scale": scale,
        "resize": _pixels(resize, "--resize"),
        "crop": _pixels(crop, "--crop"),
        "layout": layout,
        "bgr": bgr,
        "letterbox": letterbox,
    }


@functools.wraps(data_words)
def needed_data(**words: Any) -> Words:
    """The same, for a command that cannot do without."""
    found = data_words(**words)
    if found["data"] is None:
        from roundel.options import no_data

        raise no_data()
    return found


def kept_words(
    checkpoint: Annotated[
        Path | None, option("Folder that holds what is done, shard by shard.", panel=_WORK)
    ] = None,
    resume: Annotated[bool, option("Go on from the checkpoint.", "--resume", panel=_WORK)] = False,
) -> Words:
    """Where a run writes down what is done."""
    return {"checkpoint": checkpoint, "resume": resume}


def work_words(
    executor: Annotated[
        str | None, option("local (this process, the default), processes, or ray.", panel=_WORK)
    ] = None,
    workers: Annotated[int | None, option("How many at once; else one to a core.", panel=_WORK)] = None,
    address: Annotated[
        str | None, option("Of a running Ray cluster; else one starts here.", panel=_WORK)
    ] = None,
    shared_files: Annotated[
        bool,
        option(
            "The cluster sees this machine's files: workers read the data.", "--shared-files", panel=_WORK
        ),
    ] = False,
) -> Words:
    """Where a run's work is done; None for this process."""
    if executor is None:
        if workers is not None or address is not None or shared_files:
            raise RecipeError(
                "--workers, --address and --shared-files need an executor.",
                expected="--executor processes or --executor ray, too",
            )
        return {"executor": None}
    from roundel.work.executors import executor as named

    return {"executor": named(executor, address=address, workers=workers, shared_files=shared_files)}


def settings_tree(settings: list[str] | None) -> dict[str, Any]:
    """Nested recipe changes from --set's words."""
    import yaml

    tree: dict[str, Any] = {}
    for setting in settings or ():
        key, equals, text = setting.partition("=")
        if not equals:
            raise RecipeError(
                "A --set option has no value.",
                where=setting,
                expected="KEY=VALUE",
                hint="For example weights.type=int8.",
            )
        *path, last = key.strip().split(".")
        part = tree
        for name in path:
            part = part.setdefault(name, {})
            if not isinstance(part, dict):
                raise RecipeError(
                    f"'{name}' is a group of recipe values, and --set made it a single value.",
                    where=setting,
                    observed=f"{name}={part}",
                    hint=f"Name the value: --set {name}.NAME=VALUE.",
                )
        try:
            part[last] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise RecipeError(
                "The value of a --set option cannot be read.",
                where=setting,
                observed=" ".join(str(error).split())[:200],
                expected="a YAML value: true, 8, int16, [1, 2]",
            ) from error
    return tree


def put_json(tree: object) -> None:
    """Print what another program reads."""
    sys.stdout.write(json.dumps(tree, indent=1) + "\n")


def put(as_json: bool, tree: TreeT, show: Callable[[Console, TreeT], object]) -> None:
    """Print the tree for another program, or show it to people."""
    from roundel.report.console import terminal

    if as_json:
        put_json(tree)
    else:
        show(terminal(), tree)


def put_report(page: Path | None) -> None:
    """Say where the page is, if there is one."""
    from roundel.report.console import terminal

    if page is not None:
        terminal().print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)


def live_line(*, silent: bool) -> Listeners | None:
    """Where progress is shown: a live line on a terminal, else now and then a plain one; and the log file.

    With `silent`, when another program reads or nobody, the log file alone.
    """
    from roundel.report.console import terminal
    from roundel.report.progress import Listeners, LogListener, ProgressListener, listener_of

    heard: list[ProgressListener | LogListener] = []
    if not silent:
        heard.append(listener_of(terminal(stderr=True)))
    log = LOG.get()
    if log is not None:
        heard.append(LogListener(log, interval=0))
    return Listeners(heard) if heard else None


def names(text: str | None) -> list[str]:
    """'a,b' as names."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def random_data(count: int, shapes: list[str] | None) -> RandomSpec:
    """Random samples, with the shapes that the user gave."""
    from roundel.data import RandomSpec

    given = {}
    for text in shapes or ():
        name, equals, size = text.rpartition("=")
        if not equals or not all(part.isdigit() for part in size.split("x")):
            raise RecipeError("--shape takes a name and a size.", observed=text, expected="NAME=1x3x48x320")
        given[name] = tuple(int(part) for part in size.split("x"))
    return RandomSpec(count=count, shapes=given)


def _numbers(text: str | None, option: str) -> list[float] | None:
    """'0.1,0.2' as numbers."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.replace(" ", ",").split(",") if part]
    except ValueError as error:
        raise RecipeError(
            f"{option} takes numbers.", observed=text, expected="for example 0.485,0.456,0.406"
        ) from error


def _pixels(text: str | None, option: str) -> int | list[int] | None:
    """'256' or '224x320' (height x width)."""
    if text is None:
        return None
    try:
        sides = [int(part) for part in text.lower().split("x")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2):
        raise RecipeError(
            f"{option} takes a size.", observed=text, expected="256 or 224x320 (height x width)"
        )
    return sides[0] if len(sides) == 1 else sides
