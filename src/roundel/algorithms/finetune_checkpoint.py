"""What fine-tuning has done so far: one file of plain arrays for each layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from numpy.typing import NDArray

from roundel.algorithms.finetune_report import FinetuneReport
from roundel.algorithms.packing import packed_params, unpacked_params
from roundel.checkpoints import Memory
from roundel.checkpoints.plain import as_array, as_tree
from roundel.types import QParams

_FACTS = "facts"

Changes = dict[str, tuple[NDArray[Any], QParams | None]]  # codes with their format, or real numbers


@dataclass(slots=True)
class Progress:
    """Layers that are done, what was reported about them, and the constants that changed."""

    reports: list[FinetuneReport] = field(default_factory=list)
    changes: Changes = field(default_factory=dict)


def save(memory: Memory, number: int, report: FinetuneReport, changes: Changes) -> None:
    """Write one layer down.

    Raises:
        OutputError: it cannot be written.
    """
    words, arrays = packed_params({name: p for name, (_, p) in changes.items() if p is not None})
    arrays |= {f"codes.{place}": codes for place, (codes, _) in enumerate(changes.values())}
    facts = {"report": asdict(report), "params": words, "names": list(changes)}
    memory.save(number, {**arrays, _FACTS: as_array(facts)})


def load(memory: Memory) -> Progress:
    """The layers that an earlier run has done, from the first on.

    Raises:
        DataError: a file is damaged, or of another run.
    """
    progress = Progress()
    while (arrays := memory.load(len(progress.reports))) is not None:
        facts = as_tree(arrays[_FACTS])
        params = unpacked_params(facts["params"], arrays)
        progress.changes |= {
            name: (arrays[f"codes.{place}"], params.get(name)) for place, name in enumerate(facts["names"])
        }
        progress.reports.append(FinetuneReport(**facts["report"]))
    return progress
