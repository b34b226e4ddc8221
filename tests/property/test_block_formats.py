"""Block formats keep their promises on any tensor: idempotent, monotone, symmetric, block by block."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from onnx import TensorProto, helper

from roundel.numerics import blocks
from roundel.numerics import floats as fb
from roundel.numerics.blocks import ELEMENTS, BlockFloat, MicroExponents, Microscaling
from roundel.numerics.floats import Rounding, round_bfloat16
from roundel.qdq.functions import attach
from roundel.qdq.functions.blocks import BlockFormat, operator, written
from roundel.qdq.nodes import QUARK

FORMS: dict[str, BlockFormat] = {
    "bfp16": BlockFloat(),
    "bfp16 half up": BlockFloat(rounding=Rounding.HALF_UP),
    "bfp 10 bits half away": BlockFloat(10, 4, Rounding.HALF_AWAY),
    "mx6": MicroExponents(13),
    "mx9 half up": MicroExponents(16, rounding=Rounding.HALF_UP),
    "mx wide": MicroExponents(16, 12, 4, 3, Rounding.HALF_AWAY),
    "mxfp8e4m3": Microscaling("fp8_e4m3"),
    "mxfp4e2m1": Microscaling("fp4_e2m1"),
    "mxint8": Microscaling(),
    "mxint8 half away": Microscaling(rounding=Rounding.HALF_AWAY),
}
COMPILER = {"bfp16 compiler": BlockFloat(compiler=True)}  # keeps fewer promises
EVERY = {**FORMS, **COMPILER}

anything = st.floats(width=32)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
shapes = hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=36).filter(
    lambda shape: 1 < np.prod(shape) < 1000
)
relaxed = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
every_form = pytest.mark.parametrize("form", EVERY.values(), ids=EVERY)


def bits(x: NDArray[Any]) -> NDArray[np.uint32]:
    """All that two arrays can differ in, but for the payload of a NaN."""
    return np.where(np.isnan(x), np.float32(np.nan), x).astype(np.float32).view(np.uint32)


def tensors(elements: st.SearchStrategy[float]) -> st.SearchStrategy[NDArray[np.float32]]:
    return hnp.arrays(np.float32, shapes, elements=elements, fill=st.nothing())


@each_form
@relaxed
@given(x=tensors(finite), data=st.data())
def test_idempotent(form: BlockFormat, x: NDArray[np.float32], data: st.DataObject) -> None:
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    if _is_int8(form):
        x = np.abs(x)  # the one code more below zero, -128, would raise the block's exponent
    once = form.apply(x, axis)
    np.testing.assert_array_equal(form.apply(once, axis), once)


def _is_int8(form: BlockFormat) -> bool:
    return isinstance(form, Microscaling) and form.element_dtype == "int8"


@every_form
@relaxed
@given(x=hnp.arrays(np.float32, (1, 16), elements=finite))
def test_monotone(form: BlockFormat, x: NDArray[np.float32]) -> None:
    """In one block, whose peak stays, a larger value never becomes a smaller one."""
    if isinstance(form, MicroExponents):  # which has a grid for each sub-block
        form = MicroExponents(form.bit_width, 16, 16, 1, form.rounding)
    else:
        form = type(form)(**{**fields(form), "block_size": 16})
    peak = np.abs(x).max()
    x[0, :2] = peak, -peak
    result = form.apply(x, 1)[0]
    ordered = result[np.argsort(x[0], kind="stable")]
    assert (ordered[1:] >= ordered[:-1]).all()


def fields(form: BlockFormat) -> dict[str, Any]:
    return {name: getattr(form, name) for name in form.__dataclass_fields__}


SYMMETRIC = {n: f for n, f in FORMS.items() if f.rounding is not Rounding.HALF_UP and not _is_int8(f)}


@pytest.mark.parametrize("form", SYMMETRIC.values(), ids=SYMMETRIC)
@relaxed
@given(x=tensors(anything))
def test_symmetric(form: BlockFormat, x: NDArray[np.float32]) -> None:
    """-x becomes minus what x becomes."""
    np.testing.assert_array_equal(form.apply(-x, 0), -form.apply(x, 0))


@every_form
@relaxed
@given(x=hnp.arrays(np.float32, (3, 70), elements=anything), data=st.data())
def test_blocks_are_independent(form: BlockFormat, x: NDArray[np.float32], data: st.DataObject) -> None:
    whole = form.apply(x, 1)
    start = data.draw(st.integers(0, 69 // form.block_size)) * form.block_size
    alone = form.apply(np.ascontiguousarray(x[:, start : start + form.block_size]), 1)
    np.testing.assert_array_equal(bits(whole[:, start : start + form.block_size]), bits(alone))


@every_form
@relaxed
@given(x=tensors(anything), data=st.data())
def test_the_axis_may_be_any(form: BlockFormat, x: NDArray[np.float32], data: st.DataObject) -> None:
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    moved = np.ascontiguousarray(np.moveaxis(x, axis, 0))
    expected = np.moveaxis(form.apply(moved, 0), 0, axis)
    np.testing.assert_array_equal(bits(form.apply(x, axis)), bits(expected))


@every_form
@relaxed
@given(x=tensors(anything))
def test_fast_is_exact(form: BlockFormat, x: NDArray[np.float32]) -> None:
    """Blocks of ordinary size take a short way; it ends at the same place as the definition."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fb, "ordinary", lambda peaks: False)
        expected = form.apply(x, 0)
    np.testing.assert_array_equal(bits(form.apply(x, 0)), bits(expected))


@every_form
def test_pieces_do_not_show(form: BlockFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is worked on in pieces; where it is cut makes no difference."""
    x = np.random.default_rng(0).normal(size=(3, 37, 2, 5)).astype(np.float32)
    expected = [form.apply(x, axis) for axis in range(4)]
    monkeypatch.setattr(blocks, "_PIECE", 64)
    for axis in range(4):
        np.testing.assert_array_equal(bits(form.apply(x, axis)), bits(expected[axis]))


@cache
def _session(form: BlockFormat, axis: int, rank: int) -> ort.InferenceSession:
    node = helper.make_node(operator(form), ["x"], ["y"], "node", domain=QUARK, **written(form, axis))
    shape = [f"d{i}" for i in range(rank)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(QUARK, 1)]
    bare = ir.from_proto(helper.make_model(graph, opset_imports=imports, ir_version=8))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(ir.to_proto(attach(bare)).SerializeToString(), options)


@every_form
@relaxed
@given(x=tensors(anything), data=st.data())
def test_the_function_is_the_numerics(form: BlockFormat, x: NDArray[np.float32], data: st.DataObject) -> None:
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    got = _session(form, axis, x.ndim).run(None, {"x": x})[0]
    np.testing.assert_array_equal(bits(got), bits(form.apply(x, axis)))


@relaxed
@given(x=tensors(anything))
def test_bfloat16_first(x: NDArray[np.float32]) -> None:
    form = BlockFloat(bfloat16_first=True)
    np.testing.assert_array_equal(bits(form.apply(x, 0)), bits(BlockFloat().apply(round_bfloat16(x), 0)))


@pytest.mark.parametrize("element", [name for name in ELEMENTS if name != "int8"])
def test_every_element_is_held(element: str) -> None:
    """All numbers of a small float, beside its largest: each stays what it is."""
    kind = ELEMENTS[element]
    steps = 2**kind.mantissa_bits
    normal = {(1 + m / steps) * 2.0**e for e in range(kind.bottom, kind.top + 1) for m in range(steps)}
    subnormal = {m / steps * 2.0**kind.bottom for m in range(steps)}
    held = sorted(value for value in normal | subnormal if value <= kind.largest)
    assert held[-1] == kind.largest
    form = Microscaling(element, 2)
    pairs = np.asarray([(kind.largest, value) for value in held], np.float32)
    np.testing.assert_array_equal(form.apply(pairs, 1), pairs)
    between = np.asarray([(kind.largest, (a + b) / 2) for a, b in itertools.pairwise(held)], np.float32)
    ends = np.asarray(held[:-1]), np.asarray(held[1:])
    found = form.apply(between, 1)[:, 1]
    assert (np.isin(found, held)).all()
    assert ((found == ends[0]) | (found == ends[1])).all()
