import pytest

from roundel.passes.operators import split_large_pools


@pytest.mark.parametrize(
    ("size", "kernel"), [((32, 32), (4, 4)), ((24, 30), (4, 5)), ((23, 24), (1, 4)), ((56, 56), (7, 7))]
)
def test_large_pool_in_two_steps(net, apply, size, kernel):
    n = net()
    n.input("x", (1, 2, *size))
    n.node("GlobalAveragePool", ["x"], "y", name="pool")
    n.output("y")
    done = apply(n, split_large_pools)
    assert done.ops == {"AveragePool": 1, "GlobalAveragePool": 1}
    assert done.node("AveragePool").attributes["kernel_shape"].value == kernel


@pytest.mark.parametrize("size", [(16, 32), (7, 7), (29, 31), (2, 523)])
def test_small_or_prime_pools_stay(net, apply, size):
    n = net()
    n.input("x", (1, 2, *size))
    n.node("GlobalAveragePool", ["x"], "y")
    n.output("y")
    assert apply(n, split_large_pools, 0).rewrites == 0


def test_open_size_stays(net, apply):
    n = net()
    n.input("x", (1, 2, "H", 32), (1, 2, 32, 32))
    n.node("GlobalAveragePool", ["x"], "y")
    n.output("y")
    assert apply(n, split_large_pools, 0).rewrites == 0
