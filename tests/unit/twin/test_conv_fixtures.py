"""The fixtures measured on a Phoenix NPU: every count, sum and hash."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roundel
from npu_files import codes, fixture_input, fixture_model
from roundel.model.session import open_session

FIXTURES = json.loads((Path(__file__).parent / "conv_fixtures.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda f: f"C{f['C']}-{f['shift_cut']}-{f['shift_bias']}")
def test_every_code_of_the_fixtures(fixture: dict[str, Any], dtype: Any) -> None:
    channels, cut, reverse = fixture["C"], fixture["shift_cut"], fixture["reverse"]
    model = fixture_model(channels, cut, fixture["shift_bias"], reverse=reverse, dtype=dtype)
    twin, plain = roundel.npu_session(model), open_session(model.SerializeToString(), simulate=True)
    assert twin.summary.measured_share == 1
    total = 0
    for kind, (differing, total_of_codes, digest) in fixture["inputs"].items():
        feed = {"x": fixture_input(kind, channels, reverse=reverse)}
        npu, even = (codes(session.run(None, feed)[0], -cut) for session in (twin, plain))
        assert np.count_nonzero(npu != even) == differing, kind
        assert int(npu.sum(dtype=np.int64)) == total_of_codes, kind
        assert hashlib.sha256(npu.tobytes()).hexdigest()[:16] == digest, kind
        total += differing
    assert total == fixture["logged_total"]


@pytest.mark.parametrize("cut", [-14, -8, 17, 24])
def test_a_conv_that_the_compiler_refuses_runs_on_the_cpu(cut: int) -> None:
    model = fixture_model(32, cut, 0)
    twin, plain = roundel.npu_session(model), open_session(model.SerializeToString(), simulate=True)
    assert twin.summary.refused is not None
    feed = {"x": fixture_input("ramp", 32)}
    np.testing.assert_array_equal(twin.run(None, feed)[0], plain.run(None, feed)[0])
