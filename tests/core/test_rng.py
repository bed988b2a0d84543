"""Keyed randomness: the same integers everywhere, and good enough to simulate with.

Every test has a fixed seed, so it either passes always or never. Bounds are about five standard
deviations wide.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from kedge.core import rng

DOUBLE = torch.float64


def z_score(counts: Tensor) -> float:
    """Chi-square of equal expected counts, in standard deviations from its mean."""
    expected = counts.sum() / len(counts)
    chi2, dof = float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1
    return (chi2 - dof) / math.sqrt(2 * dof)


def histogram(values: Tensor, bins: int) -> Tensor:
    return torch.bincount(values.flatten().long(), minlength=bins).to(DOUBLE)


# -- the integers ------------------------------------------------------------------------------


def mix(x: int) -> int:
    """lowbias32 on Python integers."""
    x &= 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def fold(key: tuple[int, int], data: int) -> tuple[int, int]:
    a = mix(mix(key[0] ^ (data & 0xFFFFFFFF)) ^ key[1])
    return a, mix(a + key[1] + 0x9E3779B9)


def unsigned(x: Tensor) -> list[int]:
    return [v & 0xFFFFFFFF for v in x.tolist()]


def test_pinned_integers() -> None:
    """These numbers may never change: results in the world depend on them."""
    assert rng.key(0).tolist() == [0, 33350994]
    assert rng.key(1).tolist() == [1492470133, -1322174618]
    assert rng.key(2**40 + 3).tolist() == [-654533100, 1243369171]
    assert rng.fold(rng.key(0), "data").tolist() == [1399279575, -1442357992]
    bits = [-1368424207, -476194369, 1864879796, -809870637]
    assert rng.bits(rng.key(0), (4,)).tolist() == bits
    assert rng.permutation(rng.key(0), 8).tolist() == [4, 7, 0, 3, 1, 5, 6, 2]
    assert rng.integers(rng.key(0), (6,), 10).tolist() == [6, 8, 4, 8, 5, 0]


def test_pinned_reals() -> None:
    """Equal up to the last bits of a device's logarithms and sines."""
    assert rng.uniform(rng.key(0), (2,)).tolist() == [0.6813888549804688, 0.8891273140907288]
    assert rng.normal(rng.key(0), (3,), DOUBLE).tolist() == pytest.approx(
        [-1.3850444752505844, 0.7896525803980415, 0.607634432332505], rel=1e-12
    )
    assert float(rng.beta(rng.key(0), 0.5, 0.5, DOUBLE)) == pytest.approx(4.3112633755893625e-4)
    assert float(rng.beta(rng.key(1), 2.0, 5.0, DOUBLE)) == pytest.approx(0.40488272171984824)


def test_tensors_and_plain_integers_agree() -> None:
    for seed in (0, 1, 12345, 2**31 - 1, 2**31, 2**45 + 7, -1):
        key = rng.key(seed)
        plain = fold((seed & 0x7FFFFFFF, (seed >> 31) & 0x7FFFFFFF), 0)
        assert tuple(unsigned(key)) == plain
        for data in (0, 1, 77, 2**31 - 1, -1):
            assert tuple(unsigned(rng.fold(key, data))) == fold(plain, data)
        word = zlib.crc32(b"fedprox") & 0x7FFFFFFF
        assert tuple(unsigned(rng.fold(key, "fedprox"))) == fold(plain, word)
        drawn = unsigned(rng.bits(key, (5,)))
        assert drawn == [mix(mix(i + plain[0]) ^ plain[1]) for i in range(5)]


def test_keys_are_int32_pairs_and_differ_by_seed() -> None:
    keys = torch.stack([rng.key(s) for s in [*range(1000), 2**31, 2**32, 2**33]])
    assert keys.dtype == torch.int32
    assert keys.shape == (1003, 2)
    assert len(torch.unique(keys, dim=0)) == 1003


def test_a_key_is_made_on_its_device() -> None:
    assert rng.key(3, "meta").device.type == "meta"
    assert rng.key(3).device.type == "cpu"
    assert torch.equal(rng.key(3, "cpu"), rng.key(3))


def test_folding_a_tensor_an_int_and_a_batch_of_keys_is_the_same() -> None:
    root, clients = rng.key(3), torch.tensor([0, 5, 9, 2**31 - 1])
    keys = rng.fold(root, clients)
    assert keys.shape == (4, 2)
    for key, client in zip(keys, clients.tolist(), strict=True):
        assert torch.equal(key, rng.fold(root, client))
    steps = rng.fold(keys, 7)
    assert torch.equal(steps[2], rng.fold(rng.fold(root, 9), 7))
    grid = rng.fold(keys[:, None], torch.arange(3))
    assert grid.shape == (4, 3, 2)
    assert torch.equal(grid[1, 2], rng.fold(rng.fold(root, 5), 2))
    assert torch.equal(rng.fold(root, torch.tensor(5, dtype=torch.int32)), rng.fold(root, 5))


def test_split_gives_the_first_folds() -> None:
    keys = rng.split(rng.key(1), 3)
    assert len(keys) == 3
    assert all(torch.equal(k, rng.fold(rng.key(1), i)) for i, k in enumerate(keys))


def test_bits_at_any_counter_are_the_bits_of_the_stream() -> None:
    key = rng.key(4)
    at = torch.tensor([5, 0, 3], dtype=torch.int32)
    assert torch.equal(rng.bits_at(key, at), rng.bits(key, (6,))[at.long()])
    keys = rng.fold(key, torch.arange(2))
    both = rng.bits_at(keys[:, None, :], at)
    assert torch.equal(both[1], rng.bits_at(keys[1], at))


def test_a_draw_of_another_shape_is_the_same_stream() -> None:
    key = rng.key(5)
    assert torch.equal(rng.bits(key, (2, 3)).flatten(), rng.bits(key, (6,)))
    assert rng.bits(key, ()).shape == ()
    assert rng.normal(key, ()).shape == ()
    assert rng.normal(key, (0, 3)).shape == (0, 3)


def test_a_draw_changes_no_key() -> None:
    key = rng.key(6)
    before, version = key.clone(), key._version
    rng.normal(key, (3,))
    rng.permutation(key, 3)
    rng.fold(key, 1)
    assert torch.equal(key, before)
    assert key._version == version


# -- equal in a loop, under vmap, in float32 and float64 ---------------------------------------

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "bits": lambda k: rng.bits(k, (7,)),
    "uniform": lambda k: rng.uniform(k, (2, 3)),
    "normal": lambda k: rng.normal(k, (5,), DOUBLE),
    "integers": lambda k: rng.integers(k, (5,), 13),
    "permutation": lambda k: rng.permutation(k, 9),
    "beta": lambda k: rng.beta(k, 0.3, 0.7, DOUBLE),
    "fold": lambda k: rng.fold(rng.fold(k, "part"), 3),
    "split": lambda k: torch.stack(rng.split(k, 3)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_loop_and_vmap_draw_the_same(name: str) -> None:
    keys = rng.fold(rng.key(7), torch.arange(6))
    looped = torch.stack([DRAWS[name](k) for k in keys])
    mapped = vmap(DRAWS[name])(keys)
    if looped.is_floating_point() and name != "uniform":
        torch.testing.assert_close(mapped, looped, rtol=1e-14, atol=1e-15)
    else:
        assert torch.equal(mapped, looped)


def test_vmap_over_what_is_folded_in() -> None:
    key, steps = rng.key(8), torch.arange(5)
    mapped = vmap(lambda t: rng.uniform(rng.fold(key, t), (3,)))(steps)
    assert torch.equal(mapped, torch.stack([rng.uniform(rng.fold(key, t), (3,)) for t in range(5)]))


def test_vmap_over_the_range_and_the_shape_of_beta() -> None:
    keys, high = rng.fold(rng.key(9), torch.arange(3)), torch.tensor([2, 30, 400])
    mapped = vmap(lambda k, n: rng.integers(k, (4,), n))(keys, high)
    looped = [rng.integers(k, (4,), int(n)) for k, n in zip(keys, high, strict=True)]
    assert torch.equal(mapped, torch.stack(looped))
    a = torch.tensor([0.2, 1.0, 5.0], dtype=DOUBLE)
    mapped = vmap(lambda k, a: rng.beta(k, a, 2 * a, DOUBLE))(keys, a)
    looped = [rng.beta(k, float(x), 2 * float(x), DOUBLE) for k, x in zip(keys, a, strict=True)]
    torch.testing.assert_close(mapped, torch.stack(looped), rtol=1e-13, atol=0)


def test_uniforms_are_the_same_numbers_in_both_precisions() -> None:
    single = rng.uniform(rng.key(10), (10_000,), torch.float32)
    double = rng.uniform(rng.key(10), (10_000,), DOUBLE)
    assert torch.equal(single.to(DOUBLE), double)
    assert torch.equal(double * 2**24, (double * 2**24).floor())
    assert float(double.min()) >= 0
    assert float(double.max()) < 1


def test_normals_are_nearly_the_same_in_both_precisions() -> None:
    single = rng.normal(rng.key(11), (10_000,), torch.float32)
    double = rng.normal(rng.key(11), (10_000,), DOUBLE)
    torch.testing.assert_close(single.to(DOUBLE), double, rtol=0, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_draws_are_rounded_and_below_one(dtype: torch.dtype) -> None:
    uniform = rng.uniform(rng.key(0), (10_000,), dtype)
    rounded = rng.uniform(rng.key(0), (10_000,)).to(dtype)
    assert bool((rounded == 1).any())  # which would lie outside of the interval
    assert torch.equal(uniform, rounded.clamp_max(1 - torch.finfo(dtype).eps))
    normal = rng.normal(rng.key(0), (10_000,), dtype)
    assert torch.equal(normal, rng.normal(rng.key(0), (10_000,)).to(dtype))


# -- nothing that a captured graph cannot hold -------------------------------------------------


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", DRAWS)
def test_no_draw_reads_a_value_back_to_the_host(name: str) -> None:
    key = rng.key(12)
    with Recorder() as seen:
        DRAWS[name](key)
    assert len(seen.ops) > 3  # the recorder did record
    assert not seen.ops & {"_local_scalar_dense", "nonzero", "is_nonzero", "equal"}


def test_beta_copies_nothing_from_the_host() -> None:
    key = rng.key(12)
    with Recorder() as seen:
        rng.beta(key, 0.3, 0.7, torch.float32)
    assert "lift_fresh" not in seen.ops


def test_draws_compile_to_a_graph_without_breaks() -> None:
    traced = make_fx(
        lambda k: (rng.normal(k, (4,)), rng.permutation(rng.fold(k, 1), 5), DRAWS["beta"](k))
    )(rng.key(0))
    for seed in (1, 2):  # traced at one key, run at another: no value was baked in
        key = rng.key(seed)
        normal, order, beta = traced(key)
        assert torch.equal(normal, rng.normal(key, (4,)))
        assert torch.equal(order, rng.permutation(rng.fold(key, 1), 5))
        assert torch.equal(beta, DRAWS["beta"](key))


# -- distributions -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 99])
def test_every_byte_and_every_pair_of_neighbours_is_uniform(seed: int) -> None:
    bits = rng.bits(rng.key(seed), (1 << 17,))
    for shift in (0, 8, 16, 24):
        assert abs(z_score(histogram((bits >> shift) & 255, 256))) < 5
    for shift in (0, 28):
        nibble = (bits >> shift) & 15
        for lag in (1, 2, 16):
            pairs = nibble[:-lag] * 16 + nibble[lag:]
            assert abs(z_score(histogram(pairs, 256))) < 5


@pytest.mark.parametrize("seed", [0, 1, 99])
def test_the_first_draws_of_neighbouring_keys_are_uniform(seed: int) -> None:
    keys = rng.fold(rng.key(seed), torch.arange(1 << 17))
    first = rng.bits_at(keys, torch.zeros((), dtype=torch.int32))
    for values in (keys[:, 0], keys[:, 1], first):
        for shift in (0, 24):
            assert abs(z_score(histogram((values >> shift) & 255, 256))) < 5
    nibble = (first >> 28) & 15
    assert abs(z_score(histogram(nibble[:-1] * 16 + nibble[1:], 256))) < 5


def test_neighbouring_seeds_are_unrelated() -> None:
    first = torch.stack([rng.bits(rng.key(s), ()) for s in range(4096)])
    assert abs(z_score(histogram((first >> 26) & 63, 64))) < 5


def test_nested_folds_never_collide_and_do_not_commute() -> None:
    root, n = rng.key(13), 300
    grid = rng.fold(rng.fold(root, torch.arange(n))[:, None], torch.arange(n))  # [n, n, 2]
    assert len(torch.unique(grid.reshape(-1, 2), dim=0)) == n * n
    assert not torch.equal(rng.fold(rng.fold(root, 1), 2), rng.fold(rng.fold(root, 2), 1))
    assert not torch.equal(rng.fold(rng.fold(root, 0), 0), rng.fold(root, 0))


def test_streams_of_different_keys_are_uncorrelated() -> None:
    clients, draws = 1000, 128
    keys = rng.fold(rng.fold(rng.key(14), "clients"), torch.arange(clients))
    u = vmap(lambda k: rng.uniform(k, (draws,), DOUBLE))(keys) - 0.5
    r = (u @ u.T) * 12 / draws  # correlations, each of variance 1 / draws
    off = r[~torch.eye(clients, dtype=torch.bool)]
    assert abs(float((off**2).mean()) * draws - 1) < 0.03
    assert float(off.abs().max()) * math.sqrt(draws) < 6.5
    columns = (u.T @ u) * 12 / clients  # the same draw number of all clients
    off = columns[~torch.eye(draws, dtype=torch.bool)]
    assert float(off.abs().max()) * math.sqrt(clients) < 6


def test_moments_of_uniforms() -> None:
    u, n = rng.uniform(rng.key(15), (200_000,), DOUBLE), 200_000
    assert abs(float(u.mean()) - 1 / 2) < 5 * math.sqrt(1 / 12 / n)
    assert abs(float((u**2).mean()) - 1 / 3) < 5 * math.sqrt(4 / 45 / n)
    assert abs(z_score(histogram((u * 100).floor(), 100))) < 5


def test_moments_of_normals() -> None:
    n = 400_001  # odd: the last pair is cut in half
    z = rng.normal(rng.key(16), (n,), DOUBLE)
    assert abs(float(z.mean())) < 5 / math.sqrt(n)
    assert abs(float((z**2).mean()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float((z**3).mean())) < 5 * math.sqrt(15 / n)
    assert abs(float((z**4).mean()) - 3) < 5 * math.sqrt(96 / n)
    quantiles = torch.special.ndtr(z)
    assert abs(z_score(histogram((quantiles * 64).floor(), 64))) < 5
    cos, sin = z[: n // 2], z[n // 2 + 1 :]  # the two halves of Box and Muller's pairs
    assert abs(float((cos * sin).mean())) < 5 / math.sqrt(n / 2)
    assert abs(float((cos**2 * sin**2).mean()) - 1) < 5 * math.sqrt(8 / (n / 2))


@pytest.mark.parametrize("high", [1, 2, 7, 10, 1000])
def test_integers_are_uniform_below_high(high: int) -> None:
    drawn = rng.integers(rng.key(17), (100_000,), high)
    assert drawn.dtype == torch.int64
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) == high - 1
    if high > 1:
        assert abs(z_score(histogram(drawn, high))) < 5


def test_integers_up_to_the_largest_range() -> None:
    drawn = rng.integers(rng.key(18), (50_000,), 1 << 24)
    assert int(drawn.max()) < 1 << 24
    assert abs(z_score(histogram(drawn >> 18, 64))) < 5


def test_permutations_are_uniform() -> None:
    keys = rng.fold(rng.key(19), torch.arange(12_000))
    orders = vmap(lambda k: rng.permutation(k, 4))(keys)  # [12000, 4]
    assert torch.equal(orders.sort(1).values, torch.arange(4).expand(12_000, 4))
    _, counts = torch.unique(orders @ torch.tensor([64, 16, 4, 1]), return_counts=True)
    assert len(counts) == 24
    assert abs(z_score(counts.to(DOUBLE))) < 5


def test_a_long_permutation_has_every_element_once() -> None:
    order = rng.permutation(rng.key(20), 100_000)
    assert torch.equal(order.sort().values, torch.arange(100_000))
    assert int((order == torch.arange(100_000)).sum()) < 10  # fixed points: one is expected
    assert rng.permutation(rng.key(20), 0).tolist() == []
    assert rng.permutation(rng.key(20), 1).tolist() == [0]


@pytest.mark.parametrize(("a", "b"), [(0.2, 0.2), (1.0, 1.0), (0.1, 3.0), (5.0, 2.0), (50.0, 50.0)])
def test_moments_of_beta(a: float, b: float) -> None:
    n = 40_000
    keys = rng.fold(rng.key(21), torch.arange(n))
    x = vmap(lambda k: rng.beta(k, a, b, DOUBLE))(keys)
    assert bool(((x >= 0) & (x <= 1)).all())
    moment = 1.0
    moments = []  # E x^k = prod (a + i) / (a + b + i)
    for i in range(6):
        moment *= (a + i) / (a + b + i)
        moments.append(moment)
    for k in (1, 2, 3):
        spread = math.sqrt((moments[2 * k - 1] - moments[k - 1] ** 2) / n)
        assert abs(float((x**k).mean()) - moments[k - 1]) < 5 * spread


def test_beta_of_tiny_concentration_is_zero_or_one_and_never_nan() -> None:
    keys = rng.fold(rng.key(22), torch.arange(2000))
    x = vmap(lambda k: rng.beta(k, 1e-3, 1e-3, torch.float32))(keys)
    assert bool(x.isfinite().all())
    assert float(((x < 1e-3) | (x > 1 - 1e-3)).float().mean()) > 0.98
    assert abs(float(x.mean()) - 0.5) < 5 * 0.5 / math.sqrt(2000)


def test_the_host_and_the_device_mix_alike() -> None:
    """By numpy on the host, by torch's operators under a map (and on a GPU)."""
    ends = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 0x7FEB352D], dtype=torch.int32)
    drawn = torch.randint(-(2**31), 2**31 - 1, (7, 6), dtype=torch.int32)
    for x in (ends, drawn, drawn.T, drawn[::2, 1:]):
        before = x.clone()
        assert torch.equal(rng._mix(x), torch.func.vmap(rng._mix)(x))
        assert torch.equal(x, before)
