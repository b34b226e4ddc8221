"""`roundel auto`: the fastest number format that keeps a model within an accuracy budget."""

from roundel.ladder.budget import Drop, parse_drop, parse_time
from roundel.ladder.rungs import RUNGS, Rung
from roundel.ladder.types import AutoResult, Step, Verdict
from roundel.ladder.walk import auto

__all__ = ["RUNGS", "AutoResult", "Drop", "Rung", "Step", "Verdict", "auto", "parse_drop", "parse_time"]
