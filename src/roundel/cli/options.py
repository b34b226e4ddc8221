"""Options that several commands share: one function declares them, one decorator adds them to a command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundel.errors import RecipeError

if TYPE_CHECKING:
    from roundel.data import RandomSpec
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roundel.recipe.settings import Data
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from roundel.work.executors import Executor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roundel.torch import Exported


def with_options(
    command: Callable[..., None],
    options: Callable[..., object],
    parameter: str,
    leave_out: Collection[str] = (),
) -> Callable[..., None]:
    """Give a command the options that a function declares; what that makes of them reaches it as a parameter.

    Args:
        command: of typer; it has the parameter.
        options: its signature is shown to typer, and it is called with the user's words.
        parameter: of the command, for the result.
        leave_out: options that this command does not offer; they keep their defaults.
    """
    offered = inspect.signature(options, eval_str=True).parameters
    shared = {name: option for name, option in offered.items() if name not in leave_out}
    own = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def run(**words: Any) -> None:
        choice = options(**{name: words.pop(name) for name in shared})
        command(**words, **{parameter: choice})

    parameters = [p for p in own.parameters.values() if p.name != parameter]
    merged = [*parameters, *shared.values()]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in merged]
    )
    run.__annotations__ = {p.name: p.annotation for p in merged}
    return run


Model = Annotated[Path, typer.Argument(help="The float ONNX model.", show_default=False)]
AnyModel = Annotated[
    Path,
    typer.Argument(
        help="The float model: an ONNX file; of PyTorch a .pt2 file, or package.module:factory.",
        show_default=False,
    ),
]
Preset = Annotated[
    str | None,
    typer.Option("--preset", "-p", help="Preset name, a8w8 if not given; see `roundel presets`."),
]
RecipeFile = Annotated[
    Path | None, typer.Option("--recipe", "-r", help="A recipe file (YAML or JSON) instead of a preset.")
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude", "-x", help="Keep in float: a node or tensor name, a glob, re:REGEX or op:TYPE."
    ),
]
Include = Annotated[
    list[str] | None, typer.Option("--include", help="Quantize only these (same words as --exclude).")
]
ExcludeSubgraph = Annotated[
    list[str] | None,
    typer.Option("--exclude-subgraph", help="Keep in float all between tensors: 'a,b->c,d'."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="Change a recipe value, for example -s weights.per_channel=true."),
]
Report = Annotated[
    Path | None,
    typer.Option("--report", help="Also write one HTML page with all of it.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


DEFAULT_PRESET = "a8w8"


def chosen_recipe(preset: str | None, recipe: Path | None) -> str | Path:
    """The one source of the recipe; two would leave the reader guessing which one won."""
    if preset is not None and recipe is not None:
        raise RecipeError(
            "Both --preset and --recipe were given.",
            observed=f"--preset {preset} --recipe {recipe}",
            expected="one of them",
            hint=f"To build on the preset, write `extends: {preset}` into the recipe file.",
        )
    return recipe if recipe is not None else preset or DEFAULT_PRESET


def recipe_changes(
    settings: list[str] | None,
    include: list[str] | None = None,
    subgraphs: list[str] | None = None,
    data: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Nested recipe changes from the command line's words."""
    tree: dict[str, Any] = {}
    for setting in settings or ():
        _assign(tree, setting)
    if include:
        _section(tree, "selection", "--include")["include"] = include
    if subgraphs:
        borders = [_subgraph(text) for text in subgraphs]
        _section(tree, "selection", "--exclude-subgraph")["exclude_subgraphs"] = borders
    given = {key: value for key, value in (data or {}).items() if value not in (None, False)}
    if given:
        _section(tree, "data", "an image option").update(given)
    return tree


def _section(tree: dict[str, Any], key: str, setting: str) -> dict[str, Any]:
    inner = tree.setdefault(key, {})
    if not isinstance(inner, dict):
        raise RecipeError(
            f"'{key}' is a group of recipe values, and --set made it a single value.",
            where=setting,
            observed=f"{key}={inner}",
            hint=f"Name the value: --set {key}.NAME=VALUE.",
        )
    return inner


def _assign(tree: dict[str, Any], setting: str) -> None:
    import yaml

    key, equals, text = setting.partition("=")
    if not equals:
        raise RecipeError(
            "A --set option has no value.",
            where=setting,
            expected="KEY=VALUE",
            hint="For example weights.type=int8.",
        )
    *path, last = key.strip().split(".")
    for part in path:
        tree = _section(tree, part, setting)
    try:
        tree[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(
            "The value of a --set option cannot be read.",
            where=setting,
            observed=" ".join(str(error).split())[:200],
            expected="a YAML value: true, 8, int16, [1, 2]",
        ) from error


def _subgraph(text: str) -> dict[str, list[str]]:
    start, arrow, end = text.partition("->")
    if not arrow:
        raise RecipeError("A subgraph needs both ends.", where=text, expected="'input,…->output,…'")
    return {
        "inputs": [w.strip() for w in start.split(",") if w.strip()],
        "outputs": [w.strip() for w in end.split(",") if w.strip()],
    }


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


def numbers(text: str | None, option: str) -> list[float] | None:
    """'0.1,0.2' as numbers."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.replace(" ", ",").split(",") if part]
    except ValueError as error:
        raise RecipeError(
            f"{option} takes numbers.", observed=text, expected="for example 0.485,0.456,0.406"
        ) from error


def pixels(text: str | None, option: str) -> int | list[int] | None:
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


_DATA, _IMAGES = "Data", "Images"


@dataclass(frozen=True, slots=True)
class DataChoice:
    """What the user said about the data.

    Attributes:
        source: a path, random samples, or None when nothing was given.
        preprocessing: the recipe's `data` section, as plain values.
    """

    source: object
    preprocessing: dict[str, Any]

    @property
    def options(self) -> Data:
        """Checked.

        Raises:
            RecipeError: a value makes no sense.
        """
        from roundel.recipe.load import load_recipe

        return load_recipe("a8w8", {"data": self.preprocessing}).data

    def required(self) -> object:
        """The source.

        Raises:
            RecipeError: there is none.
        """
        if self.source is None:
            raise RecipeError(
                "No data was given.",
                expected="--data DIR",
                hint="Or --random N for a first look, without any meaning for accuracy.",
            )
        return self.source


def _options(
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of images, .npy or .npz files, or one .npy/.npz file.", rich_help_panel=_DATA
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Use at most this many.", rich_help_panel=_DATA)] = None,
    random: Annotated[
        int | None, typer.Option(help="Use this many random samples.", rich_help_panel=_DATA)
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Shape of a random input: NAME=1x3x48x320.", rich_help_panel=_DATA),
    ] = None,
    mean: Annotated[
        str | None, typer.Option(help="Per channel, e.g. 0.5,0.5,0.5", rich_help_panel=_IMAGES)
    ] = None,
    std: Annotated[str | None, typer.Option(help="Per channel.", rich_help_panel=_IMAGES)] = None,
    scale: Annotated[
        str | None, typer.Option(help="unit (pixels / 255, the default) or raw.", rich_help_panel=_IMAGES)
    ] = None,
    resize: Annotated[
        str | None, typer.Option(help="Short side, or HEIGHTxWIDTH.", rich_help_panel=_IMAGES)
    ] = None,
    crop: Annotated[
        str | None, typer.Option(help="Centre crop: side, or HEIGHTxWIDTH.", rich_help_panel=_IMAGES)
    ] = None,
    layout: Annotated[str | None, typer.Option(help="nchw or nhwc.", rich_help_panel=_IMAGES)] = None,
    bgr: Annotated[bool, typer.Option("--bgr", help="Blue first.", rich_help_panel=_IMAGES)] = False,
) -> DataChoice:
    """The choice that the options make. Only its signature is shown to typer."""
    if data is not None and random is not None:
        raise RecipeError(
            "Both --data and --random were given.",
            expected="one of them",
            hint="Use --data for a real result, --random for a first look.",
        )
    if samples is not None and samples < 1:
        raise RecipeError("--samples is too small.", observed=samples, expected="1 or more")
    given = {
        "samples": samples,
        "mean": numbers(mean, "--mean"),
        "std": numbers(std, "--std"),
        "scale": scale,
        "resize": pixels(resize, "--resize"),
        "crop": pixels(crop, "--crop"),
        "layout": layout,
        "bgr": bgr or None,
    }
    source = random_data(random, shape) if random is not None else data
    return DataChoice(source, {key: value for key, value in given.items() if value is not None})


def takes_data(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options above; they reach it as its parameter `data`, a `DataChoice`."""
    return with_options(command, _options, "data")


_PANEL = "Long runs"


class WorkChoice(TypedDict):
    """What the user said, as `roundel.quantize` and its like take it."""

    executor: Executor | None
    checkpoint: Path | None
    resume: bool


def _work_options(
    executor: Annotated[
        str | None,
        typer.Option(
            help="local (this process, the default), processes, or ray.",
            rich_help_panel=_PANEL,
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="How many at once; else one to a core.", rich_help_panel=_PANEL, show_default=False
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Of a running Ray cluster; else one starts here.", rich_help_panel=_PANEL, show_default=False
        ),
    ] = None,
    shared_files: Annotated[
        bool,
        typer.Option(
            "--shared-files",
            help="The cluster sees this machine's files: workers read the data.",
            rich_help_panel=_PANEL,
        ),
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Folder that holds what is done, shard by shard.", rich_help_panel=_PANEL, show_default=False
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint.", rich_help_panel=_PANEL)
    ] = False,
) -> WorkChoice:
    """The choice that the options make. Only its signature is shown to typer."""
    if executor is None and (workers is not None or address is not None or shared_files):
        raise RecipeError(
            "--workers, --address and --shared-files need an executor.",
            expected="--executor processes or --executor ray, too",
        )
    chosen: Executor | None = None
    if executor is not None:
        from roundel.work.work import executor as named

        chosen = named(executor, address=address, workers=workers, shared_files=shared_files)
    return WorkChoice(executor=chosen, checkpoint=checkpoint, resume=resume)


def takes_work(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options above; they reach it as its parameter `work`, a `WorkChoice`."""
    return with_options(command, _work_options, "work")


def takes_executor(command: Callable[..., None]) -> Callable[..., None]:
    """As `takes_work`, for a command that remembers what it has done in a way of its own."""
    return with_options(command, _work_options, "work", leave_out=("checkpoint", "resume"))


def opened_model(model: Path, shapes: list[str] | None, *, dynamic_batch: bool) -> Path | Exported:
    """An ONNX file as it is; what is of PyTorch, exported.

    Args:
        model: what the user typed.
        shapes: of example inputs, NAME=1x3x48x320, for a factory that brings none.
        dynamic_batch: leave the first dimension of all inputs open.
    """
    from roundel.torch import is_torch_source, opened

    if is_torch_source(model):
        return opened(model, _example(shapes), dynamic_batch=dynamic_batch)
    if dynamic_batch:
        raise RecipeError(
            "--dynamic-batch is for models in PyTorch.",
            where=model,
            hint="An ONNX model says its shapes itself; `-s prepare.fixed_shapes=…` fixes open ones.",
        )
    return model


def _example(shapes: list[str] | None) -> object:
    """Inputs by parameter name, in the shapes given; the export alone sees them."""
    if not shapes:
        return None
    pass
    from roundel.torch.opening import require_exporter

    require_exporter()
    import torch

    generator: Any = torch.Generator().manual_seed(0)
    sizes = random_data(1, shapes).shapes
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
