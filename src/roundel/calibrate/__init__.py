"""Calibration: one pass over the data for every statistic, then ranges and scales."""
