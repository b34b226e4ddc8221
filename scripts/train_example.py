"""Train the embedded example and write ``digits.onnx`` and ``digits.npz`` into ``src/roundel/example``.

    python -m venv /tmp/train
    /tmp/train/bin/pip install torch==2.13.0 scikit-learn onnx onnxruntime
    /tmp/train/bin/python scripts/train_example.py --baseline

The network is a MobileNetV2 in small: a stem, three inverted-residual blocks (two with the residual Add),
two branches joined by Concat, average pooling, a 1x1 head and a Gemm classifier, all with ReLU6. It takes the
8x8 digits of scikit-learn doubled to 16x16 (``roundel.example.preprocess``). The ONNX graph is written node
by node, not by an exporter, so that it looks like a model from the field: BatchNormalization is not folded,
ReLU6 is Clip with its bounds as initializers, the batch is dynamic, and every node has a name.

What was done to the weights, and why. The depthwise weights of a real MobileNetV2, once BatchNormalization is
folded into them, span very different ranges from channel to channel; this is what makes plain per-tensor
quantization lose accuracy there. A net trained for a minute on digits does not get that far by itself. So,
after training, ``spread_channels`` draws a log-normal factor for each channel on both sides of every
depthwise layer: the BatchNormalization before a ReLU6 is multiplied by the factor and the layer after it
divided by it. For a channel that stays below 6 before and after, ReLU6 passes the factor through, and the
function is the same; a channel that comes near 6 on the training images keeps its factor of 1. The script
compares the outputs before and after on held-out images too.

How much to spread was chosen for the lesson: of some forty settings (the two sigmas, the least factor, the
seed of the draw, and one shorter training), judged on the evaluation images themselves, this is one where
plain per-tensor int8 MinMax loses about two points of accuracy without a collapse, power-of-two scales
somewhat more, and per-channel weights nothing. Neighbouring settings differ by a point or more, and some
collapse with power-of-two scales. So the example shows what quantization methods do to such a network; it is
no measure of how often, or how badly, networks suffer. ``--baseline`` measures it with
onnxruntime.quantization.

Seeds are fixed. Another CPU or another build of torch may still round differently, and so give a slightly
different file; the checks at the end hold for any.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "src" / "roundel" / "example"

SEED = 20
EVAL_COUNT = 450
CALIB_COUNT = 100
EPOCHS = 40
BATCH = 64
PEAK_RATE = 0.01
NOISE = 1.0  # standard deviation, in pixel steps (0 to 16)
SPREAD_SEED = 31
IN_SPREAD = 1.8  # sigma of the log-normal factors on what a depthwise layer takes
OUT_SPREAD = 0.5  # the same for what it gives
FACTOR_MIN = 0.04
CEILING = 5.0  # a channel is scaled only where it stays below this, so that ReLU6's bound is out of reach


def load_package_example() -> Any:
    """Load ``roundel.example`` from its file, without the rest of the package and what it depends on."""
    spec = importlib.util.spec_from_file_location("roundel_example", EXAMPLE / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Data(NamedTuple):
    """The fixed split; images are uint8 with values 0 to 16, of shape (count, 8, 8)."""

    train_x: np.ndarray
    train_y: np.ndarray
    calib_x: np.ndarray
    calib_y: np.ndarray
    eval_x: np.ndarray
    eval_y: np.ndarray


def load_data() -> Data:
    """Split the digits: 450 held out for evaluation, 100 of the training images also for calibration."""
    digits = load_digits()
    x, y = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
    train_x, eval_x, train_y, eval_y = train_test_split(
        x, y, test_size=EVAL_COUNT, random_state=SEED, stratify=y
    )
    _, calib_x, _, calib_y = train_test_split(
        train_x, train_y, test_size=CALIB_COUNT, random_state=SEED, stratify=train_y
    )
    return Data(train_x, train_y, calib_x, calib_y, eval_x, eval_y)


def augment(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Shift every image by up to one pixel each way and add noise."""
    count, height, width = images.shape
    padded = np.pad(images.astype(np.float32), ((0, 0), (1, 1), (1, 1)))
    top, left = rng.integers(0, 3, size=(2, count))
    rows = top[:, None, None] + np.arange(height)[None, :, None]
    columns = left[:, None, None] + np.arange(width)[None, None, :]
    moved = padded[np.arange(count)[:, None, None], rows, columns]
    noisy = moved + rng.normal(0.0, NOISE, size=moved.shape)
    return np.clip(noisy, 0.0, 16.0).astype(np.float32)


class ConvBN(nn.Module):
    """Conv without bias, BatchNorm and, where asked for, ReLU6."""

    def __init__(
        self, in_ch: int, out_ch: int, kernel: int, stride: int = 1, groups: int = 1, act: bool = True
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_ch, out_ch, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(out_ch)
        self.act = nn.ReLU6() if act else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the three in turn."""
        out: torch.Tensor = self.act(self.bn(self.conv(x)))
        return out


class InvertedResidual(nn.Module):
    """1x1 expand, 3x3 depthwise, linear 1x1 project; added to the input where the shapes agree."""

    def __init__(self, in_ch: int, mid_ch: int, out_ch: int, stride: int) -> None:
        super().__init__()
        self.expand = ConvBN(in_ch, mid_ch, 1)
        self.depthwise = ConvBN(mid_ch, mid_ch, 3, stride, groups=mid_ch)
        self.project = ConvBN(mid_ch, out_ch, 1, act=False)
        self.residual = stride == 1 and in_ch == out_ch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block."""
        y: torch.Tensor = self.project(self.depthwise(self.expand(x)))
        return x + y if self.residual else y


class DigitNet(nn.Module):
    """The example network: (N, 1, 16, 16) to ten logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvBN(1, 16, 3)
        self.blocks = nn.ModuleList(
            [
                InvertedResidual(16, 64, 16, 1),
                InvertedResidual(16, 64, 24, 2),
                InvertedResidual(24, 96, 24, 1),
            ]
        )
        self.branch_conv = ConvBN(24, 24, 3)
        self.branch_pool = nn.MaxPool2d(3, 1, 1)
        self.branch_proj = ConvBN(24, 24, 1)
        self.pool = nn.AvgPool2d(2)
        self.head = ConvBN(48, 96, 1)
        self.classifier = nn.Linear(96, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give the logits."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = torch.cat([self.branch_conv(x), self.branch_proj(self.branch_pool(x))], dim=1)
        x = self.head(self.pool(x))
        out: torch.Tensor = self.classifier(x.mean(dim=(2, 3)))
        return out


def train(net: DigitNet, data: Data, preprocess: Any) -> None:
    """Train with AdamW under a one-cycle rate."""
    rng = np.random.default_rng(SEED)
    # No decay on BatchNorm and biases.
    decayed = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}], lr=PEAK_RATE
    )
    steps = len(data.train_x) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=EPOCHS * steps)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.05)
    labels = torch.from_numpy(data.train_y.astype(np.int64))
    net.train()
    for epoch in range(EPOCHS):
        images = torch.from_numpy(preprocess(augment(data.train_x, rng)))
        order = torch.from_numpy(rng.permutation(len(images)))
        total = 0.0
        for step in range(steps):
            at = order[step * BATCH : (step + 1) * BATCH]
            optimizer.zero_grad()
            loss = loss_of(net(images[at]), labels[at])
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1}: loss {total / steps:.4f}", flush=True)
    net.eval()


@torch.no_grad()
def channel_peaks(net: DigitNet, layer: ConvBN, images: torch.Tensor) -> torch.Tensor:
    """Give each channel's largest value before ReLU6."""
    peaks: list[torch.Tensor] = []
    handle = layer.bn.register_forward_hook(lambda _m, _i, out: peaks.append(out.amax(dim=(0, 2, 3))))
    for part in images.split(256):
        net(part)
    handle.remove()
    return torch.stack(peaks).amax(dim=0)


@torch.no_grad()
def spread_channels(net: DigitNet, images: torch.Tensor) -> None:
    """Make the channel ranges around the depthwise layers uneven, leaving the function as it is."""
    rng = np.random.default_rng(SPREAD_SEED)
    for index, block in enumerate(net.blocks):
        sides = (
            (block.expand, block.depthwise, IN_SPREAD),
            (block.depthwise, block.project, OUT_SPREAD),
        )
        for before, after, sigma in sides:
            peaks = channel_peaks(net, before, images).clamp(min=1e-3)
            drawn = torch.from_numpy(rng.lognormal(-sigma, sigma, size=len(peaks))).to(torch.float32)
            factor = drawn.clamp(min=FACTOR_MIN).minimum(CEILING / peaks)
            free = peaks < CEILING
            factor = torch.where(free, factor, torch.ones_like(factor))
            before.bn.weight.mul_(factor)
            before.bn.bias.mul_(factor)
            if after.conv.groups > 1:
                after.conv.weight.div_(factor[:, None, None, None])
            else:
                after.conv.weight.div_(factor[None, :, None, None])
            print(f"block {index}: {int(free.sum())} of {len(free)} channels scaled before ReLU6")
        conv, bn = block.depthwise.conv, block.depthwise.bn
        folded = conv.weight.flatten(1).abs().amax(dim=1) * bn.weight.abs() / (bn.running_var + bn.eps).sqrt()
        low, middle, high = np.quantile(folded.numpy(), [0.1, 0.5, 1.0])
        print(f"block {index}: folded depthwise ranges: 10 % {low:.3f}, median {middle:.3f}, max {high:.3f}")


class GraphWriter:
    """Collects named nodes and initializers."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.constant("relu6_min", np.array(0.0, dtype=np.float32))
        self.constant("relu6_max", np.array(6.0, dtype=np.float32))

    def constant(self, name: str, value: np.ndarray | torch.Tensor) -> str:
        """Add an initializer."""
        array = value.detach().numpy() if isinstance(value, torch.Tensor) else value
        self.initializers.append(numpy_helper.from_array(np.array(array, order="C"), name))
        return name

    def node(
        self, op: str, inputs: list[str], name: str, output: str | None = None, **attributes: Any
    ) -> str:
        """Add a node with one output and give the output's name."""
        result = output or f"{name}_out"
        self.nodes.append(helper.make_node(op, inputs, [result], name=name, **attributes))
        return result

    def conv_bn(self, layer: ConvBN, x: str, name: str) -> str:
        """Add Conv, BatchNormalization and, where the layer has it, Clip."""
        conv, bn = layer.conv, layer.bn
        kernel, pad = conv.kernel_size[0], int(conv.padding[0])
        x = self.node(
            "Conv",
            [x, self.constant(f"{name}.conv.weight", conv.weight)],
            f"{name}_conv",
            kernel_shape=[kernel, kernel],
            strides=list(conv.stride),
            pads=[pad] * 4,
            dilations=[1, 1],
            group=conv.groups,
        )
        parameters = {
            "weight": bn.weight,
            "bias": bn.bias,
            "running_mean": bn.running_mean,
            "running_var": bn.running_var,
        }
        names = [self.constant(f"{name}.bn.{key}", value) for key, value in parameters.items()]
        x = self.node("BatchNormalization", [x, *names], f"{name}_bn", epsilon=bn.eps, momentum=0.9)
        if isinstance(layer.act, nn.ReLU6):
            x = self.node("Clip", [x, "relu6_min", "relu6_max"], f"{name}_relu6")
        return x


def build_onnx(net: DigitNet, input_name: str) -> onnx.ModelProto:
    """Write the trained network as an ONNX graph."""
    g = GraphWriter()
    x = g.conv_bn(net.stem, input_name, "stem")
    for index, block in enumerate(net.blocks):
        name = f"block{index}"
        y = g.conv_bn(block.expand, x, f"{name}_expand")
        y = g.conv_bn(block.depthwise, y, f"{name}_depthwise")
        y = g.conv_bn(block.project, y, f"{name}_project")
        x = g.node("Add", [x, y], f"{name}_add") if block.residual else y
    left = g.conv_bn(net.branch_conv, x, "branch_conv")
    right = g.node("MaxPool", [x], "branch_pool", kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4)
    right = g.conv_bn(net.branch_proj, right, "branch_proj")
    x = g.node("Concat", [left, right], "concat", axis=1)
    x = g.node("AveragePool", [x], "pool", kernel_shape=[2, 2], strides=[2, 2])
    x = g.conv_bn(net.head, x, "head")
    x = g.node("GlobalAveragePool", [x], "global_pool")
    x = g.node("Flatten", [x], "flatten", axis=1)
    weight = g.constant("classifier.weight", net.classifier.weight)
    bias = g.constant("classifier.bias", net.classifier.bias)
    g.node("Gemm", [x, weight, bias], "classifier", output="logits", transB=1)
    graph = helper.make_graph(
        g.nodes,
        "digits",
        [helper.make_tensor_value_info(input_name, TensorProto.FLOAT, ["N", 1, 16, 16])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 10])],
        initializer=g.initializers,
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="roundel-example"
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def run_onnx(model: onnx.ModelProto | Path, x: np.ndarray) -> np.ndarray:
    """Run a model on the CPU."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    out: np.ndarray = session.run(None, {session.get_inputs()[0].name: x})[0]
    return out


def baseline(model: onnx.ModelProto, calib: np.ndarray, x: np.ndarray, labels: np.ndarray) -> None:
    """Print what static QDQ quantization by onnxruntime does to the example.

    BatchNormalization is folded first. Both signed types are symmetric and ranges are MinMax.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    name = model.graph.input[0].name

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.feeds = iter([{name: calib[i : i + 1]} for i in range(len(calib))])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

    reference = run_onnx(model, x)
    print(f"{'baseline':<24}{'accuracy':>10}{'agreement':>11}{'SQNR dB':>9}")
    with tempfile.TemporaryDirectory() as folder:
        source, prepared, target = (
            Path(folder) / f"{stem}.onnx" for stem in ("source", "prepared", "target")
        )
        onnx.save(model, source)
        quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
        for title, per_channel, activation in (
            ("per-tensor A8W8", False, QuantType.QInt8),
            ("per-channel A8W8", True, QuantType.QInt8),
            ("per-tensor A16W8", False, QuantType.QInt16),
            ("per-channel A16W8", True, QuantType.QInt16),
        ):
            quantize_static(
                str(prepared),
                str(target),
                Reader(),
                quant_format=QuantFormat.QDQ,
                per_channel=per_channel,
                activation_type=activation,
                weight_type=QuantType.QInt8,
                extra_options={
                    "ActivationSymmetric": True,
                    "WeightSymmetric": True,
                    "UseQDQContribOps": activation == QuantType.QInt16,
                },
            )
            got = run_onnx(target, x)
            accuracy = float((got.argmax(1) == labels).mean())
            agreement = float((got.argmax(1) == reference.argmax(1)).mean())
            sqnr = 10 * np.log10(np.square(reference).sum() / np.square(got - reference).sum())
            print(f"{title:<24}{accuracy:>10.4f}{agreement:>11.4f}{sqnr:>9.2f}")


def main() -> None:
    """Train, check and write."""
    parser = argparse.ArgumentParser(description="Train the embedded example.")
    parser.add_argument("--out", type=Path, default=EXAMPLE, help="folder to write into")
    parser.add_argument("--baseline", action="store_true", help="also quantize with onnxruntime and compare")
    arguments = parser.parse_args()

    torch.manual_seed(SEED)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    example = load_package_example()
    data = load_data()
    started = time.perf_counter()
    net = DigitNet()
    train(net, data, example.preprocess)
    print(f"trained in {time.perf_counter() - started:.0f} s")

    eval_x = torch.from_numpy(example.preprocess(data.eval_x))
    rng = np.random.default_rng(SEED + 2)
    seen = np.concatenate([data.train_x, augment(data.train_x, rng), augment(data.train_x, rng)])
    with torch.no_grad():
        trained = net(eval_x).numpy()
        spread_channels(net, torch.from_numpy(example.preprocess(seen)))
        logits = net(eval_x).numpy()
    moved = float(np.abs(logits - trained).max())
    print(f"largest change of a logit by the scaling, on held-out images: {moved:.2e}")
    assert moved < 1e-3

    model = build_onnx(net, example.INPUT_NAME)
    got = run_onnx(model, eval_x.numpy())
    difference = float(np.abs(got - logits).max())
    accuracy = float((got.argmax(1) == data.eval_y).mean())
    print(f"onnxruntime against torch: {difference:.2e}; accuracy on {len(got)} images: {accuracy:.4f}")
    assert difference < 1e-4
    assert accuracy >= 0.97

    arguments.out.mkdir(parents=True, exist_ok=True)
    onnx.save(model, arguments.out / "digits.onnx")
    np.savez_compressed(
        arguments.out / "digits.npz",
        calib_x=data.calib_x,
        calib_y=data.calib_y,
        eval_x=data.eval_x,
        eval_y=data.eval_y,
    )
    for name in ("digits.onnx", "digits.npz"):
        print(f"{name}: {(arguments.out / name).stat().st_size} bytes")
    if arguments.baseline:
        baseline(model, example.preprocess(data.calib_x), eval_x.numpy(), data.eval_y)


if __name__ == "__main__":
    main()
