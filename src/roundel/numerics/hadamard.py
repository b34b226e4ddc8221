"""Orthogonal matrices that spread one large coordinate over all: Hadamard matrices where the size allows."""

from __future__ import annotations

import math

import numpy as np

from roundel.types import Doubles


def rotation(size: int, seed: int, *, keep_mean: bool) -> Doubles:
    """A random orthogonal matrix with entries as alike as the size allows.

    Args:
        size: rows and columns.
        seed: the same seed gives the same matrix.
        keep_mean: the mean of `x @ rotation` is that of `x`, as a LayerNormalization behind it needs.
    """
    rng = np.random.default_rng(seed)
    core = hadamard(size)
    if core is None:
        factor, upper = np.linalg.qr(rng.standard_normal((size, size)))
        # Without the signs, the decomposition's own choice of them would favour some matrices.
        turned = np.asarray(factor * np.sign(np.diagonal(upper)))
    else:
        rows, columns = rng.choice((-1.0, 1.0), (2, size))
        turned = rows[:, None] * core * columns / math.sqrt(size)
    return _keeping_mean(turned) if keep_mean else turned


def hadamard(size: int) -> Doubles | None:
    """A matrix of ones and minus ones with orthogonal rows; None where no construction here gives one.

    Sylvester's doubling of a core by Paley: powers of two, 12, 20, 24, 28, 36, 44 … times powers of two.
    """
    if size == 1:
        return np.ones((1, 1))
    core = _paley(size)
    if core is not None or size % 2:
        return core
    half = hadamard(size // 2)
    return None if half is None else np.block([[half, half], [half, -half]])


def _paley(size: int) -> Doubles | None:
    """From the squares modulo a prime: one less than the size, or one less than half of it."""
    if size % 4:
        return None
    if (size - 1) % 4 == 3 and _is_prime(size - 1):
        skew = _bordered(size - 1)
        skew[1:, 0] = -1
        return skew + np.eye(size)
    half = size // 2
    if (half - 1) % 4 == 1 and _is_prime(half - 1):
        symmetric = _bordered(half - 1)
        ones, signs = np.array([[1.0, 1], [1, -1]]), np.array([[1.0, -1], [-1, -1]])
        return np.kron(symmetric, ones) + np.kron(np.eye(half), signs)
    return None


def _bordered(prime: int) -> Doubles:
    """Whether the difference of two numbers is a square modulo the prime (1 or -1), with a rim of ones."""
    signs = np.full(prime, -1.0)
    signs[np.arange(prime) ** 2 % prime] = 1
    signs[0] = 0
    index = np.arange(prime)
    rimmed = np.zeros((prime + 1, prime + 1))
    rimmed[0, 1:] = rimmed[1:, 0] = 1
    rimmed[1:, 1:] = signs[(index[:, None] - index) % prime]
    return rimmed


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, math.isqrt(number) + 1))


def _keeping_mean(turned: Doubles) -> Doubles:
    """Followed by the reflection that takes the image of the all-ones vector back to itself.

    It changes each entry by about 1 / size, little against their 1 / sqrt(size).
    """
    size = len(turned)
    ones = np.full(size, 1 / math.sqrt(size))
    normal = ones - turned.T @ ones
    length = float(normal @ normal)
    if length < 1e-12:
        return turned
    return np.asarray(turned - np.outer(turned @ normal, normal) * (2 / length))
