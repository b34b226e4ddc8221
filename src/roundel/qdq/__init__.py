"""The only room that creates Q/DQ nodes."""

from roundel.qdq.dynamic import write_dynamic
from roundel.qdq.write import write_qdq

__all__ = ["write_dynamic", "write_qdq"]
