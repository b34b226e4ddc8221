"""The only room that creates Q/DQ nodes."""

from roundel.qdq.functions import attach, strip
from roundel.qdq.simulate import simulate
from roundel.qdq.weight_only import write_dynamic
from roundel.qdq.write import write_qdq

__all__ = ["attach", "simulate", "strip", "write_dynamic", "write_qdq"]
