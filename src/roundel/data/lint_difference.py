"""Whether two sets of data were made alike: calibration and evaluation, for example."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from roundel.data.lint import DataFinding, Profile
from roundel.data.samples import Samples

_FEWEST = 8
_SHIFT, _SHIFT_OF_FEW = 0.35, 1.5  # of a standard deviation; the mean of a few pictures varies
_WIDER = 1.7


def difference_findings(
    calibration: Mapping[str, Profile], other: Mapping[str, Profile], what: str = "evaluation data"
) -> list[DataFinding]:
    """Inputs whose values are not alike in both.

    Args:
        calibration: profiles by input.
        other: likewise.
        what: the other data, in words.
    """
    findings = []
    for name, ours in calibration.items():
        theirs = other.get(name)
        if theirs is None or min(ours.samples, theirs.samples) < _FEWEST:
            continue
        if len(ours.mean) != len(theirs.mean) or not _differ(ours, theirs):
            continue
        findings.append(
            DataFinding(
                "different-preprocessing",
                "warning",
                f"Input '{name}' has mean {_words(ours.mean)} and standard deviation {_words(ours.std)} in"
                f" the calibration data, and {_words(theirs.mean)} and {_words(theirs.std)} in the {what}.",
                "Preprocess both alike.",
            )
        )
    return findings


def preprocessing_finding(
    calibration: object, other: object, what: str = "evaluation data"
) -> DataFinding | None:
    """Image folders whose recorded preprocessing differs, whatever the values."""
    if not calibration or not other or calibration == other:
        return None
    return DataFinding(
        "different-preprocessing",
        "warning",
        f"Calibration images were preprocessed as '{calibration}', the {what} as '{other}'.",
        "Preprocess both alike.",
    )


def record_findings(model: Path | None, samples: Samples) -> list[DataFinding]:
    """Whether data looks like that which a model was calibrated on, by the record beside the model.

    Args:
        model: the quantized model's file; None for one in memory, which has no record.
        samples: the data at hand, after a pass over it.
    """
    record = None if model is None else model.with_suffix(".json")
    if record is None or not record.is_file() or samples.description.get("random"):
        return []
    try:
        facts = json.loads(record.read_text(encoding="utf-8"))["data"]
        profiles = {name: Profile.from_dict(tree) for name, tree in facts.get("inputs", {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # another file of that name
    if facts.get("random"):
        return []
    here = samples.description
    words = preprocessing_finding(facts.get("preprocessing"), here.get("preprocessing"), "data")
    if words is not None:
        return [words]
    return difference_findings(profiles, samples.profiles, "data")


def _differ(ours: Profile, theirs: Profile) -> bool:
    few = min(ours.samples, theirs.samples)
    allowed = _SHIFT + _SHIFT_OF_FEW / math.sqrt(few)
    for mean, other_mean, std, other_std in zip(ours.mean, theirs.mean, ours.std, theirs.std, strict=True):
        narrow, wide = min(std, other_std), max(std, other_std)
        if wide > _WIDER * narrow or abs(mean - other_mean) > allowed * max(wide, 1e-12):
            return True
    return False


def _words(values: tuple[float, ...]) -> str:
    return "/".join(f"{value:.3g}" for value in values)
