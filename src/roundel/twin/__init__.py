"""The twin of a Phoenix NPU: a written model, computed as the silicon does. May import rules/ and below."""

from __future__ import annotations

from roundel.twin.session import NpuSession, Twin, TwinSummary, become_twin, npu_session, twin_of

__all__ = ["NpuSession", "Twin", "TwinSummary", "become_twin", "npu_session", "twin_of"]
