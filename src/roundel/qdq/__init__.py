"""The only room that creates Q/DQ nodes."""

from roundel.qdq.dynamic import write_dynamic
from roundel.qdq.simulate import simulate
from roundel.qdq.write import write_qdq

__all__ = ["simulate", "write_dynamic", "write_qdq"]
