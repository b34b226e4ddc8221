"""Calibration data: readers, arrays, iterables, folders and random samples, all as checked `Samples`."""

from roundel.data.images import ImagePreprocess
from roundel.data.opening import open_samples
from roundel.data.samples import Samples
from roundel.data.shards import SampleDigest
from roundel.data.sources import RandomSpec

__all__ = ["ImagePreprocess", "RandomSpec", "SampleDigest", "Samples", "open_samples"]
