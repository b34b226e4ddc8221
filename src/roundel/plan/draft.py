"""A plan in the making: marks on tensors, and groups that must share one scale."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from roundel.model.graph import is_constant, is_float32
from roundel.plan.types import Derived, Observed, Role, Shared, Source, TensorPlan, Unscaled
from roundel.types import Scheme, Storage, needs_range

OBSERVED = Observed()


@dataclass(frozen=True, slots=True)
class Mark:
    """One tensor's fate so far."""

    role: Role
    scheme: Storage
    decided_by: str
    reason: str
    source: Source = OBSERVED


class Draft:
    """Marks by tensor name, kept in graph order, and a union-find over tensors that share a scale."""

    def __init__(self, *, ties: bool = False) -> None:
        self.ties = ties  # aligned tensors all have a say, and the largest scale wins (power of two)
        self.marks: dict[str, Mark] = {}
        self.kept_float: dict[str, str] = {}
        self.folded: list[str] = []
        self.pinned: set[str] = set()  # overridden by hand: such a tensor leaves its group
        self._parent: dict[str, str] = {}
        self._leaders: dict[str, tuple[str, ...]] = {}
        self._why: dict[str, str] = {}

    def marked(self, value: ir.Value | None) -> bool:
        """Whether the value is to be quantized."""
        return value is not None and value.name in self.marks

    def mark(self, value: ir.Value | None, mark: Mark) -> bool:
        """Quantize the value unless it cannot be; the first mark of a tensor stays."""
        if value is None or not value.name or not quantizable(value):
            return False
        self.marks.setdefault(value.name, mark)
        return True

    def drop(self, name: str, reason: str) -> None:
        """Leave a tensor in float after all."""
        self.marks.pop(name, None)
        self.kept_float[name] = reason

    def leaders(self, name: str) -> tuple[str, ...]:
        """The tensors whose ranges decide this tensor's group."""
        return self._leaders.get(self._root(name), (name,))

    def share(self, member: str, leader: str, why: str) -> None:
        """Put `member` into the group of `leader`, whose range then holds for both."""
        leaders = self.leaders(leader)
        self._union(member, leader, leaders)
        self._why.setdefault(member, why)

    def align(self, covering: str, covered: list[str], why: str) -> None:
        """One scale for all: `covering` holds every value of `covered`, so its range decides.

        Leaders of the covered tensors' groups that are not themselves covered keep their say, so
        that no member of the merged group is cut off.
        """
        leaders = list(self.leaders(covering))
        for name in covered:
            leaders += [other for other in self.leaders(name) if other not in covered]
        merged = tuple(dict.fromkeys(leaders))
        for name in covered:
            self._union(name, covering, merged)
            self._why[name] = why

    def tie(self, names: list[str], why: str) -> None:
        """One scale for all, each of them with its own say."""
        leaders = tuple(dict.fromkeys(leader for name in names for leader in self.leaders(name)))
        for name in names[1:]:
            self._union(name, names[0], leaders)
            self._why[name] = why
        self._why[names[0]] = why

    def why(self, name: str) -> str | None:
        """Why the tensor shares its scale, when it does."""
        return self._why.get(name)

    def finish(self) -> dict[str, TensorPlan]:
        """The marks as tensor plans."""
        return {name: self._finished(name, mark) for name, mark in self.marks.items()}

    def _finished(self, name: str, mark: Mark) -> TensorPlan:
        source: Source = mark.source
        scheme, reason = mark.scheme, mark.reason
        if not needs_range(scheme):
            return TensorPlan(name, mark.role, scheme, Unscaled(), mark.decided_by, reason)
        leaders = self.leaders(name)
        alone = name in self.pinned or not self.pinned.isdisjoint(leaders)
        if leaders != (name,) and not alone and not isinstance(source, Derived):
            source = Shared(leaders)
            reason = self.why(name) or reason
            lead = self.marks.get(leaders[0])
            if lead is not None and isinstance(lead.scheme, Scheme) and isinstance(scheme, Scheme):
                scheme = replace(lead.scheme, granularity=scheme.granularity)
        return TensorPlan(name, mark.role, scheme, source, mark.decided_by, reason)

    def _root(self, name: str) -> str:
        parent = self._parent
        while parent.get(name, name) != name:
            parent[name] = parent.get(parent[name], parent[name])
            name = parent[name]
        return name

    def _union(self, a: str, b: str, leaders: tuple[str, ...]) -> None:
        root_a, root_b = self._root(a), self._root(b)
        self._parent[root_a] = root_b
        self._parent.setdefault(root_b, root_b)
        self._leaders[root_b] = leaders


def quantizable(value: ir.Value) -> bool:
    """Float32 values; of constants only those that hold something finite to scale."""
    if is_constant(value):
        tensor = value.const_value
        return tensor is not None and tensor.dtype is ir.DataType.FLOAT and tensor.size > 0
    return is_float32(value)
