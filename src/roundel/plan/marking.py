"""A plan in the making: marks on tensors, and groups that must share one scale."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import onnx_ir as ir

from roundel.model import graph
from roundel.plan.types import Derived, Fixed, Observed, Role, Shared, Source, TensorPlan, Unscaled
from roundel.recipe.settings import Recipe
from roundel.targets.operators import EVERY_INPUT, OpRule, Style, Trait, ops_with
from roundel.types import PerChannel, QType, Range, Scheme, Storage, needs_range

OBSERVED = Observed()

_ELEMENTWISE = ops_with(Trait.ELEMENTWISE)


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

    def __init__(self, recipe: Recipe) -> None:
        # Aligned tensors all have a say, and the largest scale wins.
        self.ties = recipe.activations.scale == "power_of_two"
        self._float_outputs = recipe.placement.skip_output_op_types  # their results stay float, whoever reads
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
        maker = value.producer()
        if maker is not None and maker.op_type in self._float_outputs:
            self.kept_float[value.name] = f"outputs of {maker.op_type} stay float, as the recipe says"
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

    def finished(self, name: str) -> TensorPlan:
        """The tensor's mark as its plan."""
        mark = self.marks[name]
        source, scheme, reason = mark.source, mark.scheme, mark.reason
        if not needs_range(scheme):
            return TensorPlan(name, mark.role, scheme, Unscaled(), mark.decided_by, reason)
        leaders = self.leaders(name)
        alone = name in self.pinned or not self.pinned.isdisjoint(leaders)
        if leaders != (name,) and not alone and not isinstance(source, Derived):
            source = Shared(leaders)
            reason = self._why.get(name) or reason
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
    if graph.is_constant(value):
        tensor = value.const_value
        return tensor is not None and tensor.dtype is ir.DataType.FLOAT and tensor.size > 0
    return graph.is_float32(value)


@dataclass(frozen=True, slots=True)
class Marker:
    """Marks tensors of one node after the other, in graph order."""

    draft: Draft
    recipe: Recipe

    def mark(self, node: ir.Node, rule: OpRule) -> None:
        """Apply the rule of the node's operator."""
        if rule.style is Style.FOLLOW:
            self._follow(node)
        elif rule.style is Style.SHARE:
            self._share(node)
        elif node.op_type != "Where" or self._reads_codes(node):
            data: Iterable[int] = rule.data
            if rule.op == "EmbedLayerNormalization":
                data = range(2, len(node.inputs))
            elif rule.data == EVERY_INPUT:
                data = range(len(node.inputs))
            for index in data:
                self._operand(node, index, rule)
            for index in rule.weights:
                self._weight(node, graph.input_at(node, index), rule)
            if rule.bias is not None:
                self._bias(node, rule.bias)
            self._outputs(node, rule)

    def _operand(self, node: ir.Node, index: int, rule: OpRule) -> None:
        value = graph.input_at(node, index)
        if not graph.is_constant(value):
            self._activation(node, value, f"input {index} of {node.op_type} '{node.name}'")
        elif rule.op in _ELEMENTWISE and self.recipe.placement.constants_as_activations:
            why = f"constant operand of {node.op_type}: takes the activation type"
            scheme = self.recipe.activations.scheme
            if isinstance(scheme, Scheme):
                scheme = replace(scheme, symmetric=self.recipe.weights.symmetric)
            self.draft.mark(value, Mark(Role.WEIGHT, scheme, str(node.name), why))
        else:
            self._weight(node, value, rule)

    def _activation(self, node: ir.Node, value: ir.Value | None, why: str, source: Source = OBSERVED) -> None:
        if not self.recipe.placement.weights_only:
            scheme = self.recipe.activations.scheme
            self.draft.mark(value, Mark(Role.ACTIVATION, scheme, str(node.name), why, source))

    def _weight(self, node: ir.Node, value: ir.Value | None, rule: OpRule) -> None:
        if value is None:
            return
        if not graph.is_constant(value):
            self._activation(node, value, f"computed weight of {node.op_type} '{node.name}'")
            return
        scheme, ndim = self.recipe.weights.scheme, graph.rank(value) or 0
        wanted = self.recipe.weights.per_channel and ndim >= 2 and value is not node.inputs[0]
        axis = channel_axis(node, rule, ndim) if wanted else None
        if isinstance(scheme, Scheme) and axis is not None:
            scheme = replace(scheme, granularity=PerChannel(axis))
        self.draft.mark(value, Mark(Role.WEIGHT, scheme, str(node.name), f"weight of {node.op_type}"))

    def _bias(self, node: ir.Node, index: int) -> None:
        value = graph.input_at(node, index)
        if value is None or self.recipe.placement.weights_only or self.recipe.bias.type == "float":
            return
        if not graph.is_constant(value):
            self._activation(node, value, f"computed bias of {node.op_type} '{node.name}'")
            return
        if self.recipe.bias.type in ("int8", "weights"):
            scheme = self.recipe.weights.scheme
            if isinstance(scheme, Scheme):
                scheme = replace(scheme, reduce_range=False)
            self.draft.mark(value, Mark(Role.BIAS, scheme, str(node.name), f"bias of {node.op_type}"))
            return
        data, weight = node.inputs[0], node.inputs[1]
        if data is None or weight is None or self.draft.marked(value):
            return
        if not (self.draft.marked(data) and self.draft.marked(weight)):
            return
        if not self._fits_channels(value, weight):
            return
        source = Derived(str(data.name), str(weight.name), *_bias_factors(node))
        scheme = Scheme(QType(self.recipe.bias.type))
        why = "bias: shares the accumulator's step"
        self.draft.mark(value, Mark(Role.BIAS, scheme, str(node.name), why, source))

    def _fits_channels(self, bias: ir.Value, weight: ir.Value) -> bool:
        """Whether the bias has an entry for each scale of its weight; C of a Gemm may have other shapes."""
        scheme = self.draft.marks[str(weight.name)].scheme
        granularity = scheme.granularity if isinstance(scheme, Scheme) else None
        if not isinstance(granularity, PerChannel):
            return True
        shape, channels = graph.static_shape(bias), graph.static_shape(weight)
        if shape is None or channels is None or len(shape) != 1:
            return False
        return shape[0] % channels[granularity.axis] == 0  # a ConvTranspose has as many for each group

    def _outputs(self, node: ir.Node, rule: OpRule | None = None) -> None:
        known = None if rule is None else rule.output_range
        for value in node.outputs:
            if known is not None:
                why = f"{node.op_type} always lies in [{known[0]:g}, {known[1]:g}]"
                self._activation(node, value, why, Fixed(Range(*known)))
            else:
                self._activation(node, value, f"output of {node.op_type} '{node.name}'")

    def _follow(self, node: ir.Node) -> None:
        value, out = node.inputs[0], node.outputs[0]
        if not self.draft.marked(value) or value is None:
            return
        if self._foldable(node, value):
            why = f"{node.op_type} '{node.name}' is done by the quantizer's saturation"
            self.draft.drop(str(value.name), why)
            self.draft.folded.append(str(node.name))
            self._activation(node, out, f"output of {node.op_type}, which saturation replaces")
            return
        self._outputs(node)
        if self._ends_here(node, value) and self.draft.marked(out):
            why = f"only {node.op_type} reads it: values outside its output's range do not matter"
            self.draft.share(str(value.name), str(out.name), why)

    def _foldable(self, node: ir.Node, value: ir.Value) -> bool:
        """Relu and Clip vanish where the next quantizer saturates at the very same bounds."""
        placement, activations = self.recipe.placement, self.recipe.activations
        return (
            placement.fold_relu
            and not activations.symmetric
            and activations.scale == "float"
            and node.op_type not in placement.skip_output_op_types
            and _spans_zero(node)
            and self._ends_here(node, value)
            and value.producer().op_type not in ("Split", "If", "Loop")  # type: ignore[union-attr]
            and quantizable(node.outputs[0])
        )

    def _ends_here(self, node: ir.Node, value: ir.Value) -> bool:
        """Whether the value was computed for this node alone, and shares its scale with no other tensor."""
        maker, placement = value.producer(), self.recipe.placement
        if maker is None or graph.only_reader(value) is not node:
            return False
        # The maker's inputs may take its scale: others may read them, whatever cuts it off behind.
        aligned = {"Concat": placement.align_concat, "Pad": placement.align_pad}
        alone = self.draft.leaders(str(value.name)) == (value.name,)
        return alone and not aligned.get(maker.op_type, False)

    def _share(self, node: ir.Node) -> None:
        value = node.inputs[0]
        if self.recipe.placement.quantize_passthrough_inputs and value is not None:
            if graph.is_constant(value):
                if node.op_type == "Gather":
                    why = f"table of Gather '{node.name}'"
                    self.draft.mark(value, Mark(Role.WEIGHT, self.recipe.weights.scheme, str(node.name), why))
            else:
                self._activation(node, value, f"input 0 of {node.op_type} '{node.name}'")
        if not self.draft.marked(value) or value is None or self.recipe.placement.weights_only:
            return
        for out in node.outputs:
            scheme = self.draft.marks[str(value.name)].scheme
            if not needs_range(scheme):
                self._activation(node, out, f"output of {node.op_type} '{node.name}'")
                continue
            why = f"{node.op_type} only moves values: same scale as its input"
            if self.draft.mark(out, Mark(Role.ACTIVATION, scheme, str(node.name), why)):
                self.draft.share(str(out.name), str(value.name), why)

    def _reads_codes(self, where: ir.Node) -> bool:
        marked = all(self.draft.marked(graph.input_at(where, index)) for index in (1, 2))
        return marked or self.recipe.placement.quantize_passthrough_inputs


def _spans_zero(node: ir.Node) -> bool:
    """Whether zero, which every range holds, lies within the bounds: else saturation would come too late."""
    if node.op_type != "Clip":
        return True
    bounds = graph.clip_bounds(node)
    return bounds is not None and (bounds[0] or 0.0) <= 0.0 <= (bounds[1] or 0.0)


def channel_axis(node: ir.Node, rule: OpRule, ndim: int) -> int | None:
    """The axis along which each output channel has its own weights."""
    if rule.channel_axis is None:
        return None
    if rule.op == "Gemm":
        return 0 if graph.attribute_int(node, "transB", 0) else 1
    return rule.channel_axis % ndim


def _bias_factors(node: ir.Node) -> tuple[float, int]:
    if node.op_type == "Gemm":
        alpha, beta = graph.attribute_float(node, "alpha", 1.0), graph.attribute_float(node, "beta", 1.0)
        return (abs(alpha / beta) if alpha and beta else 1.0), 1
    if node.op_type == "ConvTranspose":
        return 1.0, graph.attribute_int(node, "group", 1)
    return 1.0, 1
