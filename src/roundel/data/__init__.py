"""Calibration data: readers, arrays, iterables, folders and random samples, all as checked `Samples`."""

from roundel.data.opening import RandomSpec, open_samples
from roundel.data.samples import Samples
from roundel.data.shards import SampleDigest

__all__ = ["RandomSpec", "SampleDigest", "Samples", "open_samples"]
