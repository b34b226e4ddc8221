from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from roundel.calibrate.collect import collect
from roundel.calibrate.observers import HistogramObserver, StatKind
from roundel.data.shards import SampleDigest
from roundel.errors import DataError, ModelError
from roundel.model.memory import Budget, within
from roundel.types import Sample
from roundel.work.executors import LocalExecutor, Work


def build(*, shape: list[int | str] | None = None, typed: bool = True) -> ir.Model:
    """x -> Conv -> Relu -> y and Log(y + 1) -> z; 'y' is inner."""
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.standard_normal((4, 3, 3, 3)).astype(np.float32), "w")
    one = numpy_helper.from_array(np.float32(1), "one")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1], name="conv"),
        helper.make_node("Relu", ["c"], ["y"], name="relu"),
        helper.make_node("Add", ["y", "one"], ["s"], name="add"),
        helper.make_node("Log", ["s"], ["z"], name="log"),
    ]
    dims = shape or ["n", 3, "h", "w_"]
    out = ["n", 4, "h", "w_"]
    infos = (
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, out) for n in ("c", "y", "s")] if typed else []
    )
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [weight, one],
        value_info=infos,
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))


def samples(count: int = 7) -> list[Sample]:
    rng = np.random.default_rng(1)
    return [
        {"x": rng.standard_normal((1 + i % 2, 3, 4 + i, 5), dtype=np.float32) * (i + 1)} for i in range(count)
    ]


def reference(data: list[Sample]) -> dict[str, list[np.ndarray]]:
    from roundel.model.session import open_session

    model = build()
    values = {v.name: v for n in model.graph for v in n.outputs}
    model.graph.outputs.extend([values["c"], values["y"]])
    session = open_session(model, threads=1)
    runs = [session.run(["c", "y", "z"], sample) for sample in data]
    return {name: [run[i] for run in runs] for i, name in enumerate(("c", "y", "z"))}


@pytest.mark.parametrize("kind", StatKind)
@pytest.mark.parametrize("typed", [True, False])
def test_ragged_samples_give_the_exact_statistics(kind: StatKind, typed: bool) -> None:
    data = samples()
    done: list[int] = []
    got = collect(
        build(typed=typed), dict.fromkeys(["z", "x", "c", "y"], kind), data, keep=2, progress=done.append
    )
    expected = reference(data) | {"x": [s["x"] for s in data]}
    assert list(got.stats) == ["x", "c", "y", "z"]
    for name, arrays in expected.items():
        assert got.stats[name].lows == [float(a.min()) + 0.0 for a in arrays]
        assert got.stats[name].highs == [float(a.max()) for a in arrays]
        assert got.stats[name].count == sum(a.size for a in arrays)
        assert got.stats[name].kind is kind
    assert done == [1, 2, 3, 4, 5, 6, 7]
    assert got.samples_seen == 7
    assert [np.array_equal(a["x"], b["x"]) for a, b in zip(got.inputs, data, strict=False)] == [True, True]
    assert [list(o) for o in got.outputs] == [["z"], ["z"]]
    assert all(np.array_equal(o["z"], e) for o, e in zip(got.outputs, expected["z"], strict=False))
    assert got.forward_seconds > 0


def test_any_number_of_threads_gives_identical_results() -> None:
    requests = dict.fromkeys(["c", "y", "z"], StatKind.HISTOGRAM)
    results = [collect(build(), requests, samples(9), work=Work(LocalExecutor(n))) for n in (1, 2, 5)]
    for other in results[1:]:
        assert other.data_digest == results[0].data_digest
        for name, stat in results[0].stats.items():
            again = other.stats[name]
            assert isinstance(stat, HistogramObserver)
            assert isinstance(again, HistogramObserver)
            assert (again.lows, again.highs) == (stat.lows, stat.highs)
            assert again.histogram.exponent == stat.histogram.exponent
            assert np.array_equal(again.histogram.counts, stat.histogram.counts)


@pytest.mark.parametrize("typed", [True, False])
def test_little_memory_splits_the_tensors_and_changes_nothing(typed: bool) -> None:
    requests = dict.fromkeys(["x", "c", "y", "s", "z"], StatKind.HISTOGRAM)
    whole = collect(build(typed=typed), requests, samples())
    with within(Budget(live=700, held=0)):
        split = collect(build(typed=typed), requests, samples())
    for name, stat in whole.stats.items():
        assert split.stats[name].lows == stat.lows
        assert split.stats[name].count == stat.count
    assert all(np.array_equal(a["z"], b["z"]) for a, b in zip(whole.outputs, split.outputs, strict=True))


def test_the_model_is_not_changed_and_no_request_still_runs() -> None:
    model = build()
    before = ir.to_proto(model).SerializeToString()
    got = collect(model, {}, samples(3))
    assert ir.to_proto(model).SerializeToString() == before
    assert got.stats == {}
    assert len(got.outputs) == 3


def test_a_reader_may_reuse_its_array() -> None:
    def reader() -> Iterator[Sample]:
        buffer = np.empty((1, 3, 4, 4), np.float32)
        for i in range(6):
            buffer[:] = i
            yield {"x": buffer}

    got = collect(build(), {"x": StatKind.MINMAX}, reader())
    assert got.stats["x"].highs == [0, 1, 2, 3, 4, 5]
    assert [float(s["x"].max()) for s in got.inputs] == [0, 1, 2, 3, 4, 5]


def test_samples_without_elements_are_fine() -> None:
    data: list[Sample] = [{"x": np.zeros((0, 3, 4, 4), np.float32)}, *samples(2)]
    got = collect(build(), dict.fromkeys(["x", "y"], StatKind.HISTOGRAM), data)
    assert len(got.stats["y"].lows) == 2
    assert got.samples_seen == 3


def test_the_digest_is_that_of_the_data_room() -> None:
    digest = SampleDigest()
    for sample in samples():
        digest.update(sample)
    assert collect(build(), {}, samples()).data_digest == digest.hexdigest()


def test_a_nan_is_named_with_tensor_and_sample() -> None:
    data = samples()
    data[4]["x"][0, 0, 0, 0] = np.nan
    with pytest.raises(DataError) as caught:
        collect(build(), dict.fromkeys(["z", "y", "c"], StatKind.MINMAX), data)
    assert caught.value.where == "tensor 'c', sample 4"
    assert "input 'x'" in str(caught.value.hint)
    with pytest.raises(DataError) as caught:
        collect(build(), dict.fromkeys(["x", "y"], StatKind.HISTOGRAM), data)
    assert caught.value.where == "tensor 'x', sample 4"


def test_a_value_that_the_model_itself_breaks_names_the_first_tensor() -> None:
    model = build()
    model.graph.initializers["one"].const_value = ir.tensor(np.float32(0))  # Log(0) is -inf
    with pytest.raises(DataError, match="infinity") as caught:
        collect(model, dict.fromkeys(["z", "y"], StatKind.MINMAX), samples())
    assert caught.value.where == "tensor 'z', sample 0"
    assert "first such tensor" in str(caught.value.hint)


def test_a_failing_reader_propagates_and_leaves_no_thread() -> None:
    class Broken(Exception):  # noqa: N818
        pass

    def reader() -> Iterator[Sample]:
        yield from samples(5)
        raise Broken

    with pytest.raises(Broken):
        collect(build(), {"y": StatKind.HISTOGRAM}, reader())
    assert not [t for t in threading.enumerate() if t.name.startswith("roundel-collect")]


def test_a_failing_progress_callback_leaves_no_thread() -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(build(), {"y": StatKind.HISTOGRAM}, samples(), progress=stop)
    assert not [t for t in threading.enumerate() if t.name.startswith("roundel-collect")]


@pytest.mark.parametrize(
    "bad",
    [
        {"x": np.zeros((1, 5, 4, 4), np.float32)},
        {"x": np.zeros((3,), np.float32)},
        {"x": np.zeros((1, 3, 4, 4), np.float64)},
        {"other": np.zeros(1, np.float32)},
        {},
    ],
)
def test_a_sample_that_does_not_fit_is_named(bad: Sample) -> None:
    with pytest.raises(DataError, match="sample 2"):
        collect(build(), {"y": StatKind.MINMAX}, [*samples(2), bad, *samples(2)])


def test_unknown_and_constant_tensors_and_no_data() -> None:
    with pytest.raises(ModelError, match="not in the main graph"):
        collect(build(), {"yy": StatKind.MINMAX}, samples())
    with pytest.raises(ModelError, match="constant"):
        collect(build(), {"w": StatKind.MINMAX}, samples())
    with pytest.raises(DataError, match="no calibration samples"):
        collect(build(), {"y": StatKind.MINMAX}, [])
