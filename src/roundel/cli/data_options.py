"""The data and image options that several commands share, added to each by one decorator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundel.cli.options import numbers, pixels, random_data
from roundel.cli.shared_options import with_options
from roundel.errors import RecipeError

if TYPE_CHECKING:
    from roundel.recipe import Data

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
        from roundel.recipe_file import load_recipe

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
