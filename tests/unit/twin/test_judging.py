"""What is tried for Phoenix is judged by its arithmetic: the light walk agrees with the twin; it pays."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

import roundel
from helpers import rng
from npu_files import QdqNet
from roundel.model.session import open_session
from roundel.qdq.half_up import round_half_up


def _float_net() -> tuple[onnx.ModelProto, list[dict[str, Any]]]:
    """Residual blocks whose sums lose one bit: half of their results are ties."""
    random = rng(2)
    net = QdqNet(1, 8, 12, 12)
    net.nodes.clear()
    net.x = "x"
    for _ in range(5):
        before = net.x
        weight = random.normal(0, 0.1, (8, 8, 3, 3))
        net.add("Conv", before, net.const(weight), net.const(random.normal(0, 0.1, 8)), pads=[1] * 4)
        net.add("Relu", net.x)
        net.add("Add", net.x, before)
    net.add("MaxPool", net.x, kernel_shape=[3, 3], strides=[3, 3])
    net.add("Conv", net.x, net.const(random.normal(0, 0.2, (5, 8, 4, 4))), net.const(np.zeros(5)))
    data = [{"x": random.normal(size=(1, 8, 12, 12)).astype(np.float32)} for _ in range(40)]
    return net.model(), data


def _error(session: Any, plain: Any, data: list[dict[str, Any]]) -> float:
    pairs = [(session.run(None, sample)[0], plain.run(None, sample)[0]) for sample in data]
    return float(np.mean([np.mean(np.square(made - wanted)) for made, wanted in pairs]))


def test_the_walk_for_judging_computes_what_the_twin_computes() -> None:
    model, data = _float_net()
    written = roundel.quantize(model, preset="xint8_plain", data=data[:8], device="phx").model
    light = ir.from_proto(written)
    round_half_up(light)
    judged, twin = open_session(light, simulate=True), roundel.npu_session(written)
    even = open_session(written.SerializeToString(), simulate=True)
    differs = False
    for sample in data[:8]:
        np.testing.assert_array_equal(judged.run(None, sample)[0], twin.run(None, sample)[0])
        differs |= bool((even.run(None, sample)[0] != twin.run(None, sample)[0]).any())
    assert differs


def test_a_named_phoenix_is_what_steps_are_judged_by() -> None:
    model, data = _float_net()
    plain = open_session(model.SerializeToString())
    errors = {}
    for halves_up in (True, False):
        changes = None if halves_up else {"npu.halves_up": False}
        result = roundel.quantize(model, preset="xint8", data=data[:24], device="phx", changes=changes)
        assert result.record.recipe["npu"]["halves_up"] is halves_up
        errors[halves_up] = _error(roundel.npu_session(result.model), plain, data[24:])
    assert errors[True] < errors[False]
    assert not roundel.quantize(model, preset="xint8", data=data[:2]).record.recipe["npu"]["halves_up"]
