"""For every extra option that is translated: a config on which it makes a difference, and a value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from roundel.quark import (
    CalibrationMethod,
    ExtendedCalibrationMethod,
    ExtendedQuantType,
    Int8Spec,
    LayerWiseMethod,
    QLayerConfig,
    QuantType,
)


@dataclass(frozen=True)
class Case:
    """A preset, changes to it, and the value that must change what comes out."""

    value: Any
    preset: str = "A8W8"
    fields: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


X, U, BF, BFP, NB = "XINT8", "U8S8_AAWS", "BF16", "BFP16", "MATMUL_NBITS"

EIGHT = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())

CASES: dict[str, Case] = {
    # graph
    "SimplifyModel": Case(False),
    "ConvertOpsetVersion": Case(21),
    "CopySharedInit": Case([]),
    "CopyBiasInit": Case([]),
    "FoldBatchNorm": Case(False),
    "FuseInstanceNorm": Case(False),
    "FuseL2Norm": Case(False),
    "FuseGelu": Case(False),
    "FuseLayerNorm": Case(False),
    "ConvertSplitToSlice": Case(False),
    "ConvertBNToConv": Case(False),
    "ConvertReduceMeanToGlobalAvgPool": Case(False),
    "SplitLargeKernelPool": Case(False),
    "ReplaceClip6Relu": Case(True),
    "ConvertClipToRelu": Case(True),
    "FixShapes": Case("x:[1,3,8,8]"),
    "SkipPreprocess": Case(True),
    # targets
    "QuantizeAllOpTypes": Case(True),
    "WeightsOnly": Case(True),
    "MatMulConstBOnly": Case(True),
    "MixedPrecisionTensor": Case(
        {ExtendedQuantType.QInt16: ["r"]}, fields={"specific_tensor_precision": True}
    ),
    "TensorQuantOverrides": Case({"r": [{"quant_type": QuantType.QInt16}]}),
    "AlignEltwiseQuantType": Case(True),
    # pairs
    "AddQDQPairToWeight": Case(True, BF),
    "ForceQuantizeNoInputCheck": Case(True),
    "DedicatedQDQPair": Case(True),
    "DedicateDQNode": Case(True),
    "OpTypesToExcludeOutputQuantization": Case(["Conv"]),
    "NodesToExcludeOutputQuantization": Case(["conv"]),
    "UseQDQContribOps": Case(True, U),
    "RemoveQDQConvClip": Case(False),
    "RemoveQDQConvRelu": Case(False),
    "RemoveQDQConvLeakyRelu": Case(False),
    "RemoveQDQConvPRelu": Case(False),
    "RemoveQDQConvGelu": Case(True),
    "RemoveQDQInstanceNorm": Case(True),
    "RemoveFusedQDQ": Case(True, BFP),
    "RemoveQDQMulAdd": Case(True),
    "RemoveQDQBetweenOps": Case([("Mul", "Add")]),
    "FoldRelu": Case(False, U),
    # calibration
    "CalibDataSize": Case(2),
    "CalibTensorRangeSymmetric": Case(False, U),
    "CalibMovingAverage": Case(True),
    "CalibMovingAverageConstant": Case(0.1, options={"CalibMovingAverage": True}),
    "Percentile": Case(99.0, U),
    "Scenario": Case("p3", fields={"calibrate_method": CalibrationMethod.Distribution}),
    "LWPMetric": Case("mse", fields={"calibrate_method": LayerWiseMethod.LayerWisePercentile}),
    "PercentileCandidates": Case(
        [99.0, 99.9], fields={"calibrate_method": LayerWiseMethod.LayerWisePercentile}
    ),
    "MinMSEModePof2Scale": Case("MostCommon", X),
    "MinMSEMode": Case("Percentile", X),
    "WeightCalibrateMethod": Case(CalibrationMethod.MinMax),
    "SaveAndRestore": Case("ranges.npz"),
    "TensorsRangeFile": Case("ranges.npz"),
    "UseRandomData": Case(True),
    "RandomDataReaderInputShape": Case({"x": [1, 3, 8, 8]}),
    "RandomDataReaderInputDataRange": Case({"x": [0, 2]}),
    # numbers
    "ActivationSymmetric": Case(True),
    "WeightSymmetric": Case(False, U),
    "QuantizeBias": Case(False),
    "Int32Bias": Case(False),
    "Int16Bias": Case(True),
    "Int16Scale": Case(True),
    "UsePowerOf2Scale": Case(False, "VINT8"),
    "WeightScaled": Case(True, BF),
    "ActivationScaled": Case(True, BF),
    "BF16QDQToCast": Case(True, BF),
    "EnableVaimlBF16": Case(True, BF),
    "BF16WithClip": Case(True, BF),
    "BFPAttributes": Case({"bfp_method": "to_bfp_prime", "bit_width": 13}, BFP),
    "MXAttributes": Case({"element_dtype": "fp4_e2m1"}, "MXINT8"),
    "RefineBlockAxis": Case(False, BFP),
    # engine
    "ConvertLeakyReluToDPUVersion": Case(False, X),
    "ConvertSigmoidToHardSigmoid": Case(False, X),
    "ConvertHardSigmoidToDPUVersion": Case(False, X),
    "ConvertAvgPoolToDPUVersion": Case(False, X),
    "ConvertReduceMeanToDPUVersion": Case(False, X),
    "ConvertSoftmaxToDPUVersion": Case(True, X),
    "ConvertInstanceNormToDPUVersion": Case(True, X),
    "ConvertClipToDPUVersion": Case(True, X),
    "AdjustShiftCut": Case(False, X),
    "AdjustShiftBias": Case(False, X),
    "AdjustShiftRead": Case(False, X),
    "AdjustShiftWrite": Case(False, X),
    "AdjustHardSigmoid": Case(False, X),
    "AdjustShiftSwish": Case(False, X),
    "AlignConcat": Case(True),
    "AlignPool": Case(True),
    "AlignPad": Case(True),
    "AlignSlice": Case(True),
    "SimulateDPU": Case(False, X),
    "NPULimitationCheck": Case(False, X),
    # algorithms
    "FastFinetune": Case({"NumIterations": 7}),
    "CLESteps": Case(4),
    "CLEScaleAppendBias": Case(False),
    "CLETotalLayerDiffThreshold": Case(0.5),
    "BiasCorrection": Case(True, options={"QuantizationPreference": "speed"}),
    "UseGPTQ": Case(True),
    "GPTQParams": Case({"Bits": 4}, options={"UseGPTQ": True}),
    "SmoothAlpha": Case(0.8, fields={"include_sq": True}),
    "UseMatMulNBits": Case(True),
    "MatMulNBitsParams": Case({"GroupSize": 32, "Bits": 8}, NB),
    "AutoMixprecision": Case({"TargetLayerConfig": EIGHT}, "S16S8_ASWS"),
    "QuantizationPreference": Case("speed"),
    # run
    "TmpDir": Case("."),
    "EvalMetrics": Case(True),
    "EvalDataReader": Case([]),
    "Recipe": Case({"effort": "none"}),
}

FINETUNE: dict[str, Any] = {
    "OptimAlgorithm": "adaquant",
    "OptimDevice": "cuda:0",
    "InferDevice": "cuda",
    "NumIterations": 3,
    "LearningRate": 0.01,
    "BatchSize": 5,
    "NumBatches": 3,
    "DataSize": 4,
    "FixedSeed": 1,
    "EarlyStop": False,
    "TargetOpType": ["Conv"],
    "UpdateBias": False,
    "RegParam": 0.5,
    "BetaRange": (10, 2),
    "WarmStart": 0.4,
}

# Fields of the config itself, and a value that changes what comes out.
FIELDS: dict[str, Case] = {
    "calibrate_method": Case(CalibrationMethod.Percentile),
    "activation_type": Case(ExtendedQuantType.QInt16),
    "weight_type": Case(ExtendedQuantType.QInt16),
    "input_nodes": Case(["conv2"]),
    "output_nodes": Case(["conv"]),
    "op_types_to_quantize": Case(["Conv"]),
    "nodes_to_quantize": Case(["conv"]),
    "extra_op_types_to_quantize": Case(["Exp"]),
    "nodes_to_exclude": Case(["conv"]),
    "subgraphs_to_exclude": Case([(["conv"], ["relu"])]),
    "specific_tensor_precision": Case(True, options={"MixedPrecisionTensor": {QuantType.QInt16: ["r"]}}),
    "per_channel": Case(True),
    "reduce_range": Case(True),
    "optimize_model": Case(False, options={"SimplifyModel": False}),
    "use_dynamic_quant": Case(True),
    "use_external_data_format": Case(True),
    "convert_nchw_to_nhwc": Case(True),
    "include_sq": Case(True),
    "include_rotation": Case(True),
    "include_cle": Case(False),
    "include_fast_ft": Case(True),
    "enable_npu_cnn": Case(True, U),
    "enable_npu_transformer": Case(True),
    "enable_dpu": Case(True, U),
}

WEIGHT_METHODS = (CalibrationMethod.MinMax, ExtendedCalibrationMethod.MinMSE)
