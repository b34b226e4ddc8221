"""Weights in few bits: ranges, rounding, and how codes lie in bytes."""

from __future__ import annotations

import numpy as np
import pytest

from helpers import normal, rng
from roundel.numerics.packed import in_blocks, in_bytes, packed_params, round_packed
from roundel.numerics.rounding import gptq, spread
from roundel.types import PackedScheme

SCHEMES = [
    PackedScheme(bits, size, symmetric, mirrored)
    for bits in (2, 4, 8)
    for size in (16, 32)
    for symmetric, mirrored in ((True, False), (True, True), (False, False))
]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 16])
def test_bytes_hold_codes_from_the_lowest_bits_up(bits: int, count: int) -> None:
    codes = rng(1).integers(0, 2**bits, (3, count), dtype=np.uint8)
    packed = in_bytes(codes, bits)
    assert packed.shape == (3, -(-count * bits // 8))
    for row, line in zip(codes, packed, strict=True):
        number = int.from_bytes(line.tobytes(), "little")
        assert [(number >> (bits * place)) % 2**bits for place in range(count)] == row.tolist()
        assert number >> (bits * count) == 0


def test_the_last_block_is_filled_with_zeros() -> None:
    blocks = in_blocks(np.arange(5)[None], 4)
    assert blocks.tolist() == [[[0, 1, 2, 3], [4, 0, 0, 0]]]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("inputs", [32, 37])
def test_extremes_are_held_to_half_a_step(scheme: PackedScheme, inputs: int) -> None:
    weight = normal(7, inputs, seed=2) + np.float32(0.3)
    stored = round_packed(weight, scheme, search=False)
    step = np.abs(np.repeat(stored.params.scale, scheme.size, axis=1)[:, :inputs])
    # A zero point is a whole number, too: at the ends of an asymmetric range its rounding adds to the error.
    slack = 0.5 if scheme.symmetric else 1.0
    assert stored.codes.max() <= scheme.top
    assert (np.abs(stored.restored() - weight) <= slack * step * 1.0001).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_searching_is_never_worse(scheme: PackedScheme) -> None:
    weight = rng(3).standard_t(3, (9, 70)).astype(np.float32)
    errors = [
        np.square(round_packed(weight, scheme, search=search).restored() - weight).sum()
        for search in (False, True)
    ]
    assert errors[1] <= errors[0]
    if scheme.bits < 8:
        assert errors[1] < errors[0]


def test_a_negative_scale_uses_the_code_that_a_positive_one_leaves_out() -> None:
    weight = np.float32([[1.0, -0.5, 0.25, 0.0] * 4])
    plain, turned = (
        round_packed(weight, PackedScheme(4, 16, True, mirrored), search=False) for mirrored in (False, True)
    )
    assert plain.params.scale[0, 0] == np.float32(1 / 7)
    assert turned.params.scale[0, 0] == np.float32(-1 / 8)
    np.testing.assert_array_equal(turned.restored(), weight)


def test_blocks_of_zeros_and_of_next_to_nothing() -> None:
    weight = np.zeros((2, 32), np.float32)
    weight[1, 16:] = 1e-44
    for scheme in SCHEMES:
        stored = round_packed(weight, scheme, search=True)
        assert np.isfinite(stored.params.scale).all()
        assert (stored.params.scale != 0).all()
        np.testing.assert_allclose(stored.restored(), weight, atol=1e-43)


def test_importance_decides_what_is_cut() -> None:
    weight = np.full((1, 16), 0.09)
    weight[0, 0] = 1.0
    scheme = PackedScheme(4, 16)
    tame = packed_params(weight, scheme, search=True, importance=np.r_[1e-9, np.ones(15)])
    keen = packed_params(weight, scheme, search=True, importance=np.r_[1e9, np.ones(15)])
    assert tame.scale[0, 0] < keen.scale[0, 0] == np.float32(1 / 7)


def test_slabs_of_rows_are_solved_like_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scheme = normal(40, 48, seed=4), PackedScheme(4, 16, False)
    moments = spread(np.cov(normal(200, 48, seed=5).T), 0.01, act_order=True)
    whole = round_packed(weight, scheme, search=True), gptq(weight, moments, scheme, search=True)
    monkeypatch.setattr("roundel.numerics.packed._SLAB", 48 * 7)
    monkeypatch.setattr("roundel.numerics.rounding._SLAB", 48 * 7)
    parts = round_packed(weight, scheme, search=True), gptq(weight, moments, scheme, search=True)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one.codes, other.codes)
        np.testing.assert_array_equal(one.params.scale, other.params.scale)
        np.testing.assert_array_equal(one.params.zero, other.params.zero)
