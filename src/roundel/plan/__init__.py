"""Decide what every tensor becomes: a pure function of the graph and the recipe."""

from roundel.plan.build import build_plan
from roundel.plan.types import QuantPlan, TensorPlan

__all__ = ["QuantPlan", "TensorPlan", "build_plan"]
