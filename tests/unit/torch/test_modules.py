"""Modules of PyTorch in: the same file as from ONNX, the module untouched, evaluation in a torch loop."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import onnx
import pytest

import roundel
from roundel.errors import DataError, ModelError, RecipeError

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

_SPEC = importlib.util.spec_from_file_location("networks", Path(__file__).parent / "networks.py")
assert _SPEC is not None
assert _SPEC.loader is not None
networks = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(networks)


def loader(count: int = 12) -> Any:
    torch.manual_seed(1)
    pairs = torch.utils.data.TensorDataset(torch.randn(count, 3, 8, 8), torch.arange(count))
    return torch.utils.data.DataLoader(pairs, batch_size=2)


def test_same_file_as_from_the_exported_onnx_model(tmp_path: Path) -> None:
    module = networks.cnn()
    example = torch.randn(2, 3, 8, 8)
    result = roundel.quantize(
        module, tmp_path / "torch.onnx", example_inputs=example, dynamic_batch=True, data=loader()
    )
    module.eval()
    torch.onnx.export(
        module,
        (example,),
        str(tmp_path / "float.onnx"),
        dynamo=True,
        opset_version=18,
        dynamic_shapes=({0: "batch"},),
        verbose=False,
    )
    roundel.quantize(tmp_path / "float.onnx", tmp_path / "onnx.onnx", data=loader())
    assert (tmp_path / "torch.onnx").read_bytes() == (tmp_path / "onnx.onnx").read_bytes()
    assert result.record.model["name"] == "Cnn"
    assert any("equals the module on" in note and "allowed: 0.0001" in note for note in result.record.notes)
    assert result.record.data["kind"] == "iterable DataLoader"
    # Nothing of the machine that exported it.
    assert str(Path(__file__).parent).encode() not in (tmp_path / "torch.onnx").read_bytes()


def test_the_module_is_left_as_it_was(tmp_path: Path) -> None:
    module = networks.cnn().train()
    module.deep.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    result = roundel.quantize(module, example_inputs=torch.randn(1, 3, 8, 8), data=loader(), recipe="bf16")
    assert module.training
    assert module.drop.training
    assert not module.deep.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.requires_grad for parameter in module.parameters())
    image = torch.randn(1, 3, 8, 8)
    first = result.as_torch()(image)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(result.as_torch()(image), first), "the result shares memory with the module"


def test_evaluation_in_a_torch_loop() -> None:
    module = networks.cnn()
    result = roundel.quantize(
        module, example_inputs=torch.randn(1, 3, 8, 8), dynamic_batch=True, data=loader(), recipe="a16w8"
    )
    quantized = result.as_torch().eval()
    module.eval()
    for images, _ in loader():
        with torch.no_grad():
            expected, got = module(images), quantized(images)
        assert got.dtype is torch.float32
        assert got.shape == expected.shape
        assert torch.allclose(got, expected, atol=0.02 * float(expected.abs().max()))
    with pytest.raises(DataError, match="other inputs"):
        quantized(images, images)


def test_an_encoder_by_keyword_with_several_outputs() -> None:
    torch.manual_seed(0)
    module = networks.Encoder()
    ids = torch.randint(0, 20, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    samples = [{"ids": ids.numpy(), "mask": mask.numpy()}, {"ids": ids.flip(0).numpy(), "mask": mask.numpy()}]
    result = roundel.quantize(
        module,
        example_inputs={"ids": ids, "mask": mask},
        dynamic_batch=True,
        data=samples,
        recipe="a16w8_minmax",
    )
    tokens, sentence = result.as_torch()(mask=mask[:1], ids=ids[:1])
    with torch.no_grad():
        expected = module.eval()(ids[:1], mask[:1])
    assert torch.nn.functional.cosine_similarity(sentence, expected["sentence"]).min() > 0.999
    assert tokens.shape == expected["tokens"].shape
    assert result.record.counts["quantized_nodes"]["MatMul"] >= 8


def test_open_dimensions_by_name() -> None:
    class Wide(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.relu(x) * 2

    result = roundel.quantize(
        Wide(),
        example_inputs=torch.randn(2, 6),
        dynamic_shapes={"x": {0: "rows", 1: torch.export.Dim("columns")}},
        data=[torch.randn(3, 5)],
        recipe="a8w8_minmax",
    )
    shape = result.model.graph.input[0].type.tensor_type.shape
    assert [dim.dim_param for dim in shape.dim] == ["rows", "columns"]
    assert result.as_torch()(torch.ones(4, 3)).shape == (4, 3)


def test_a_program_of_torch_export() -> None:
    program = torch.export.export(networks.cnn().eval(), (torch.randn(1, 3, 8, 8),))
    result = roundel.quantize(program, data=[torch.randn(1, 3, 8, 8)], recipe="a8w8_minmax")
    assert result.record.counts["quantized_nodes"]["Conv"] == 2
    with pytest.raises(RecipeError, match="keeps its shapes"):
        roundel.quantize(program, dynamic_batch=True, data=loader())


class Branching(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        if x.sum() > 0:
            return x
        return -x


class Bessel(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.special.bessel_j0(x)


class Pairs(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x.reshape(2, -1).sum(1)


class Lottery(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.nn.functional.dropout(x, 0.5, training=True)


@pytest.mark.parametrize(
    ("module", "what", "where", "hint"),
    [
        (Branching(), "cannot trace", "if x.sum() > 0", "torch.where"),
        (Bessel(), "cannot be written as ONNX", "bessel_j0", "other operators"),
        (Pairs(), "cannot trace", None, "dynamic shapes"),
    ],
)
def test_failed_exports_name_their_cause(module: Any, what: str, where: str | None, hint: str) -> None:
    with pytest.raises(ModelError) as caught:
        roundel.quantize(module, example_inputs=torch.randn(2, 4), dynamic_batch=True)
    error = caught.value
    assert what in error.what
    assert where is None or where in str(error.where)
    assert hint in str(error.hint)
    assert len(str(error.observed)) < 400


def test_an_export_that_computes_something_else_is_refused() -> None:
    with pytest.raises(ModelError, match="does not compute") as caught:
        roundel.quantize(Lottery(), example_inputs=torch.randn(4, 64), data=[torch.ones(4, 64)])
    assert "0.0001" in str(caught.value.expected)


def test_examples_are_asked_for_and_checked() -> None:
    with pytest.raises(DataError, match="example inputs"):
        roundel.quantize(networks.cnn(), data=loader())
    with pytest.raises(DataError, match="first dimension"):
        roundel.quantize(
            networks.Encoder(),
            example_inputs=(torch.zeros(2, 7, dtype=torch.int64), torch.ones(1, 7)),
            dynamic_batch=True,
        )
    proto = onnx.ModelProto()
    with pytest.raises(RecipeError, match="for models in PyTorch"):
        roundel.quantize(proto, example_inputs=torch.zeros(1))
