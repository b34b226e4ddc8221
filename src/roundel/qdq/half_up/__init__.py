"""Halves that go up instead of to even, in any Q/DQ graph."""

from __future__ import annotations

from roundel.qdq.half_up.lattice import Lattice, finest, of_layer
from roundel.qdq.half_up.layers import SummedLayer, read_sums
from roundel.qdq.half_up.rewrite import MOVING, HalfUp, is_nearest, round_half_up

__all__ = [
    "MOVING",
    "HalfUp",
    "Lattice",
    "SummedLayer",
    "finest",
    "is_nearest",
    "of_layer",
    "read_sums",
    "round_half_up",
]
