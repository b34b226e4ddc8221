"""Searches as scripts for the documents' API write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers import activations, build, feeds, node, normal
from roundel.quark import (
    AutoMixprecisionConfig,
    AutoSearchPro,
    Int8Spec,
    Int16Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    generate_all_configs,
    get_auto_search_config,
)
from roundel.quark.errors import QuarkConfigError
from roundel.quark.search import assembled, flattened, qconfig_of

X = {"x": [1, 3, 8, 8]}
SPACE: dict[str, Any] = {
    "activation": ["Int8Spec", "Int16Spec"],
    "activation_params": {
        "symmetric": [True],
        "calibration_method": ["MinMax", "Percentile"],
        "only_if": "activation",
    },
    "weight": ["Int8Spec"],
    "weight_params": {"symmetric": [True], "only_if": "weight"},
    "cle_algo": ["cle", None],
    "cle_params": {"cle_steps": [-1, 1], "only_if": {"cle_algo": "cle"}},
}


def small(folder: Path) -> Path:
    import onnx

    nodes = [
        node("Conv", ["x", "w"], ["c"], name="conv"),
        node("Relu", ["c"], ["r"], name="relu"),
        node("Conv", ["r", "k"], ["y"], name="conv2"),
    ]
    path = folder / "small.onnx"
    onnx.save(build(nodes, X, ["y"], {"w": normal(4, 3, 3, 3), "k": normal(4, 4, 1, 1, seed=1)}), path)
    return path


class Reader:
    """Once through, as the documents' readers."""

    def __init__(self) -> None:
        self._data = iter(feeds(X, count=4))

    def get_next(self) -> Any:
        return next(self._data, None)


def pro(folder: Path, **options: Any) -> AutoSearchPro:
    given = {
        "search_space": SPACE,
        "model_input": str(small(folder)),
        "calib_data_reader": Reader(),
        "output_dir": str(folder / "out"),
        "n_trials": 4,
        "two_stage_search": False,
        **options,
    }
    return AutoSearchPro({**get_auto_search_config("A8W8_SEARCH"), **given})


def test_every_combination_of_a_space() -> None:
    configs = generate_all_configs(SPACE)
    assert len(configs) == 2 * 2 * 3
    assert sum("cle_params" in config for config in configs) == 8
    with pytest.raises(QuarkConfigError, match="no ranges"):
        generate_all_configs(get_auto_search_config("XINT8_SEARCH")["search_space"])


def test_a_group_counts_where_its_condition_holds() -> None:
    flat = flattened(SPACE)
    chosen = {name: values.values[-1] for name, values in flat.items()}
    assert assembled(SPACE, chosen)["cle_algo"] is None
    assert "cle_params" not in assembled(SPACE, chosen)
    assert assembled(SPACE, {**chosen, "cle_algo": "cle"})["cle_params"] == {"cle_steps": 1}


@pytest.mark.parametrize("name", ["XINT8_SEARCH", "A8W8_SEARCH", "A16W8_SEARCH", "ADVANCED_SEARCH"])
def test_the_searches_that_ship_stand_for_configs(name: str) -> None:
    space = get_auto_search_config(name)["search_space"]
    flat = flattened(space)
    first = {key: v.values[0] if hasattr(v, "values") else v.low for key, v in flat.items()}
    config = qconfig_of(assembled(space, first))
    assert {type(a).__name__ for a in config.algo_config} == {"AdaRoundConfig", "CLEConfig"}
    get_auto_search_config(name)["search_space"].clear()
    assert get_auto_search_config(name)["search_space"] == space


def test_the_best_of_a_grid(tmp_path: Path) -> None:
    best = pro(tmp_path, search_algo="Grid", n_trials=100).run()
    assert best["activation"] == "Int16Spec"
    out = tmp_path / "out"
    assert json.loads((out / "best_params.json").read_text()) == best
    assert len(list(out.glob("quantized_model_*.onnx"))) == 12


def test_a_study_goes_on_and_an_evaluator_decides(tmp_path: Path) -> None:
    asked: list[str] = []

    def size(path: str) -> float:
        asked.append(Path(path).name)
        return float(Path(path).stat().st_size)

    words = {"search_evaluator": size, "direction": "maximize", "load_study_if_exists": True}
    pro(tmp_path, n_trials=2, **words).run()
    assert (tmp_path / "out" / "auto_search.db").exists()
    before = len(asked)
    assert asked[0] == "small.onnx"
    pro(tmp_path, n_trials=3, **words).run()
    assert len(asked) <= before + 2


def test_calibration_first_then_fine_tuning(tmp_path: Path) -> None:
    tuned = {
        **{key: value for key, value in SPACE.items() if not key.startswith("cle")},
        "algorithms": [None, "adaround"],
        "adaround_params": {
            "num_iterations": [5],
            "learning_rate": {"type": "float", "low": 0.01, "high": 0.1, "log": True},
            "only_if": {"algorithms": "adaround"},
        },
    }
    best = pro(tmp_path, search_space=tuned, two_stage_search=True, n_trials=2, search_algo="Random").run()
    assert best["activation"] == "Int16Spec"
    assert len(list((tmp_path / "out").glob("quantized_model_calibration_*.onnx"))) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"serch_space": {}}, "Did you mean 'search_space'"),
        ({"search_metric": "psnrr"}, "Did you mean 'psnr'"),
        ({"search_algo": "CmaEs"}, "Grid, Random, TPE"),
        ({"model_input": None}, "needs 'model_input'"),
        ({"plot_results": True}, "optuna-dashboard"),
        ({"search_space": {"activation": "Int8Spec"}}, "is a list of values"),
        ({"search_space": {"weight_params": {"symmetric": [True]}}}, "says when it counts"),
        ({"direction": "down"}, "minimizes or maximizes"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(QuarkConfigError) as caught:
        pro(tmp_path, **options)
    assert words in str(caught.value)


def test_mixed_precision_chooses_layers_by_their_error(tmp_path: Path) -> None:
    wide = QLayerConfig(input_tensors=Int16Spec(), weight=Int8Spec())
    searched = AutoMixprecisionConfig(
        wide, metric_threshold=-45, metric_default="sqnr", metric_optimize_object="quality"
    )
    base = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
    types = []
    for algorithms in ([], [searched]):
        quantizer = ModelQuantizer(QConfig(base, algo_config=algorithms, PrintSummary=False))
        model = quantizer.quantize_model(str(small(tmp_path)), None, Reader())
        types.append({stored.dtype for stored in activations(model).values()})
    assert types == [{"int8"}, {"int8", "int16"}]


def test_a_misspelt_spec() -> None:
    with pytest.raises(QuarkConfigError) as caught:
        qconfig_of({"activation": "Int8Spc", "weight": "Int8Spec"})
    assert "Did you mean 'Int8Spec'" in str(caught.value)
