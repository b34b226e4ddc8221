"""Array files and folders of them."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from roundel.data import open_samples
from roundel.data.folders import natural_key
from roundel.errors import DataError
from roundel.types import InputSpec

X = np.arange(5 * 72, dtype=np.float32).reshape(5, 3, 4, 6)
FLOAT = np.dtype(np.float32)


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


def save_npy(folder: Path, names: list[str], values: np.ndarray = X) -> None:
    for name, value in zip(names, values, strict=False):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, value)


def first_values(samples: object) -> list[float]:
    return [float(s["input"].flat[0]) for s in samples]  # type: ignore[attr-defined]


def test_natural_order() -> None:
    names = ["b/1", "a/img10", "a/img2", "a/Img3", "a2/x", "a10/x", "a/img02"]
    ordered = [str(p) for p in sorted(map(Path, names), key=natural_key)]
    assert ordered == ["a/img02", "a/img2", "a/Img3", "a/img10", "a2/x", "a10/x", "b/1"]


def test_npy_folder_in_natural_order_and_again(tmp_path: Path, image_input: list[InputSpec]) -> None:
    save_npy(tmp_path, ["s1.npy", "s2.npy", "s10.npy"])
    (tmp_path / "notes.txt").write_text("ignored")
    (tmp_path / ".DS_Store").write_text("ignored")
    samples = open_samples(tmp_path, image_input)
    assert samples.count == 3
    assert first_values(samples) == first_values(samples) == [0.0, 72.0, 144.0]
    assert samples.description["path"] == str(tmp_path)


def test_npy_folder_of_batches(tmp_path: Path, image_input: list[InputSpec]) -> None:
    np.save(tmp_path / "a.npy", X)
    np.save(tmp_path / "b.npy", X)
    samples = open_samples(str(tmp_path), image_input, limit=7)
    assert samples.count == 7
    assert len(list(samples)) == 7


def test_bad_sample_names_its_file(tmp_path: Path, image_input: list[InputSpec]) -> None:
    save_npy(tmp_path, ["1.npy", "2.npy"], np.stack([X[0], np.full_like(X[0], np.nan)]))
    with pytest.raises(DataError, match=r"sample 1 \(2\.npy\)"):
        list(open_samples(tmp_path, image_input))


def test_npz_folder_by_input_name_or_single_array(tmp_path: Path, image_input: list[InputSpec]) -> None:
    np.savez(tmp_path / "1.npz", input=X[0])
    np.savez(tmp_path / "2.npz", whatever=X[1])
    np.savez_compressed(tmp_path / "3.npz", input=X[2], label=3)
    assert first_values(open_samples(tmp_path, image_input)) == [0.0, 72.0, 144.0]


def test_npz_folder_for_several_inputs(tmp_path: Path, two_inputs: list[InputSpec]) -> None:
    np.savez(tmp_path / "1.npz", input_ids=np.arange(5), attention_mask=np.ones(5, np.int32))
    (sample,) = open_samples(tmp_path, two_inputs)
    assert sample["attention_mask"].tolist() == [[1, 1, 1, 1, 1]]
    np.savez(tmp_path / "2.npz", input_ids=np.arange(5), mask=np.ones(5, np.int32))
    with pytest.raises(DataError, match="no value for input 'attention_mask'") as caught:
        list(open_samples(tmp_path, two_inputs))
    assert "2.npz" in str(caught.value)


def test_sub_folder_per_input(tmp_path: Path) -> None:
    inputs = [InputSpec("a:0", FLOAT, (1, 2)), InputSpec("b", FLOAT, (1, 2))]
    save_npy(tmp_path / "a_0", ["s2.npy", "s10.npy"], np.array([[2, 2], [10, 10]], np.float32))
    save_npy(tmp_path / "b", ["s10.npy", "s2.npy"], np.array([[-10, 0], [-2, 0]], np.float32))
    samples = open_samples(tmp_path, inputs)
    assert samples.count == 2
    assert [(s["a:0"][0, 0], s["b"][0, 0]) for s in samples] == [(2, -2), (10, -10)]


def test_missing_partner_is_named(tmp_path: Path) -> None:
    inputs = [InputSpec("a", FLOAT, (1, 2)), InputSpec("b", FLOAT, (1, 2))]
    save_npy(tmp_path / "a", ["s1.npy"], np.zeros((1, 2), np.float32))
    save_npy(tmp_path / "b", ["s1.npy", "s2.npy"], np.zeros((2, 2), np.float32))
    with pytest.raises(DataError) as caught:
        open_samples(tmp_path, inputs)
    assert str(Path("b/s2.npy")) in str(caught.value)
    assert "a/s2.npy" in str(caught.value)


def test_missing_sub_folder(tmp_path: Path) -> None:
    inputs = [InputSpec("tokens", FLOAT, (1, 2)), InputSpec("mask", FLOAT, (1, 2))]
    save_npy(tmp_path / "token", ["s1.npy"], np.zeros((1, 2), np.float32))
    save_npy(tmp_path / "mask", ["s1.npy"], np.zeros((1, 2), np.float32))
    with pytest.raises(DataError, match="Did you mean 'token'") as caught:
        open_samples(tmp_path, inputs)
    assert "'mask', 'token'" in str(caught.value)
    assert "'tokens', 'mask'" in str(caught.value)


def test_single_npy(tmp_path: Path, image_input: list[InputSpec], two_inputs: list[InputSpec]) -> None:
    np.save(tmp_path / "x.npy", X)
    samples = open_samples(tmp_path / "x.npy", image_input)
    assert samples.count == 5
    got = [s["input"] for s in samples]
    np.testing.assert_array_equal(np.concatenate(got), X)
    assert not any(isinstance(g, np.memmap) for g in got)
    with pytest.raises(DataError, match="several inputs"):
        open_samples(tmp_path / "x.npy", two_inputs)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("names", [["input"], ["x", "y"], ["pictures", "number"], ["only"]])
def test_single_npz(tmp_path: Path, image_input: list[InputSpec], order: str, names: list[str]) -> None:
    arrays = dict(zip(names, [np.asarray(X, order=order), np.arange(5)], strict=False))  # type: ignore[call-overload]
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    samples = open_samples(tmp_path / "x.npz", image_input)
    assert samples.count == 5
    for _ in range(2):
        np.testing.assert_array_equal(np.concatenate([s["input"] for s in samples]), X)
    assert samples.description["arrays"] == {"input": names[0]}


def test_single_npz_for_several_inputs(tmp_path: Path, two_inputs: list[InputSpec]) -> None:
    ids = np.arange(15).reshape(3, 5)
    np.savez(tmp_path / "x.npz", input_ids=ids, attention_mask=ids + 1, labels=np.arange(3))
    got = list(open_samples(tmp_path / "x.npz", two_inputs))
    assert [g["input_ids"].shape for g in got] == [(1, 5)] * 3
    np.testing.assert_array_equal(got[2]["attention_mask"], ids[2:] + 1)


def test_single_npz_with_a_choice(tmp_path: Path, image_input: list[InputSpec]) -> None:
    np.savez(tmp_path / "x.npz", a=X, b=X)
    with pytest.raises(DataError) as caught:
        open_samples(tmp_path / "x.npz", image_input)
    assert "'a': float32 [5, 3, 4, 6], 'b'" in str(caught.value)
    assert "input: float32 [1, 3, 4, 6]" in str(caught.value)


@pytest.mark.parametrize("kind", ["npy", "npz", "folder of npy", "folder of npz"])
def test_pickles_are_refused_and_never_loaded(
    tmp_path: Path, image_input: list[InputSpec], kind: str
) -> None:
    mark = tmp_path / "executed"
    trap = np.array([Trap(mark)], dtype=object)
    folder = tmp_path / "data"
    folder.mkdir()
    path = folder / ("x.npy" if kind.endswith("npy") else "x.npz")
    if path.suffix == ".npy":
        np.save(path, trap, allow_pickle=True)
    else:
        np.savez(path, input=trap)
    with pytest.raises(DataError, match="pickled Python objects"):
        list(open_samples(folder if kind.startswith("folder") else path, image_input))
    assert not mark.exists()


def header_only(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
    return stream.getvalue()


def test_npz_that_would_explode_is_refused_by_its_header(
    tmp_path: Path, image_input: list[InputSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("input.npy", header_only((1, 3, 1000, 1000)) + bytes(12_000_000))
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("the data were read"))
    for path in (tmp_path, tmp_path / "bomb.npz"):
        with pytest.raises(DataError) as caught:
            list(open_samples(path, image_input))
        assert "1000, 1000" in str(caught.value)
        assert "[1, 3, 4, 6]" in str(caught.value)


def test_lying_headers(tmp_path: Path, open_input: list[InputSpec]) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("input.npy", header_only((10**9, 3, 4, 6)))
    (tmp_path / "y.npy").write_bytes(header_only((10**9, 3, 4, 6)))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "y.npy").write_bytes(header_only((10**9, 3, 4, 6)))
    for name in ("x.npz", "y.npy", "folder"):
        with pytest.raises(DataError, match="cannot be read"):
            list(open_samples(tmp_path / name, open_input))


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
@pytest.mark.parametrize("content", [b"", b"not an array", b"PK\x03\x04 nor an archive"])
def test_broken_files(tmp_path: Path, image_input: list[InputSpec], name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(DataError, match="cannot be read") as caught:
            list(open_samples(path, image_input))
        assert name in str(caught.value)


def test_truncated_files(tmp_path: Path, image_input: list[InputSpec]) -> None:
    np.save(tmp_path / "x.npy", X)
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(whole[:-100])
    with pytest.raises(DataError, match=r"cannot be read"):
        list(open_samples(tmp_path / "x.npy", image_input))


def test_damaged_compressed_data(tmp_path: Path, image_input: list[InputSpec]) -> None:
    noise = np.random.default_rng(0).random((5, 3, 4, 6), dtype=np.float32)
    np.savez_compressed(tmp_path / "x.npz", input=noise)
    data = bytearray((tmp_path / "x.npz").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "x.npz").write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"x\.npz"):
        list(open_samples(tmp_path / "x.npz", image_input))


def test_missing_path_suggests_the_nearest_name(tmp_path: Path, image_input: list[InputSpec]) -> None:
    (tmp_path / "calibration").mkdir()
    with pytest.raises(DataError, match="Did you mean 'calibration'") as caught:
        open_samples(tmp_path / "calibraton", image_input)
    assert "calibraton" in str(caught.value)
    with pytest.raises(DataError, match="no folder"):
        open_samples(tmp_path / "nowhere" / "x", image_input)


def test_folder_with_nothing_usable_lists_what_is_there(tmp_path: Path, image_input: list[InputSpec]) -> None:
    with pytest.raises(DataError, match="no files"):
        open_samples(tmp_path, image_input)
    for name in ("a.txt", "b.txt", "c.pb"):
        (tmp_path / name).touch()
    with pytest.raises(DataError) as caught:
        open_samples(tmp_path, image_input)
    assert "2 x .txt, 1 x .pb" in str(caught.value)
    assert ".npy" in str(caught.value)
    with pytest.raises(DataError, match=r"no kind"):
        open_samples(tmp_path / "c.pb", image_input)


def test_mixed_folder(tmp_path: Path, image_input: list[InputSpec]) -> None:
    for name in ("a.npy", "b.jpg", "c.png"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match="2 image files and 1 array files"):
        open_samples(tmp_path, image_input)


def test_link_cycles_end(tmp_path: Path, image_input: list[InputSpec]) -> None:
    save_npy(tmp_path, ["a/1.npy"])
    (tmp_path / "a" / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert len(list(open_samples(tmp_path, image_input))) == 1
