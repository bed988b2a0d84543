"""Randomness as data: every draw is a pure function of a key, in integer tensor operations.

A key is an int32 tensor ``[2]``. ``fold(key, n)`` gives a new key for the n-th of something (a
round, a client, a step), so nothing depends on the order of execution: a draw is the same in a
loop, under ``vmap``, in a captured graph, on any device, and after a resume. The integers are
equal everywhere; uniforms are exact multiples of 2**-24, so they are equal in float32 and float64
as well.

The generator mixes a 32-bit counter with the two words of the key through the finaliser
``lowbias32`` (two xor-shift-multiply rounds, once per word); it is for simulation, not for
cryptography.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.core import tree
from kedge.core.eager import is_eager
from kedge.core.tree import Tree

# lowbias32's multipliers 0x7feb352d and 0x846ca68b as signed 32-bit integers
_M1, _M2 = 0x7FEB352D, 0x846CA68B - (1 << 32)
_GOLDEN = 0x9E3779B9 - (1 << 32)
_U1, _U2, _15, _16 = (np.uint32(n & 0xFFFFFFFF) for n in (_M1, _M2, 15, 16))


def key(seed: int, device: torch.device | str | None = None) -> Tensor:
    """The root key of an experiment."""
    words = torch.tensor([seed & 0x7FFFFFFF, (seed >> 31) & 0x7FFFFFFF], dtype=torch.int32)
    return fold(words.to(device) if device is not None else words, 0)


def fold(key: Tensor, data: Tensor | int | str) -> Tensor:
    """A new key for item ``data``; a string is folded in by its checksum.

    ``key`` may carry leading batch dimensions, and ``data`` may be a tensor that broadcasts with
    them: ``fold(key, clients)`` with clients ``[K]`` gives keys ``[K, 2]``.
    """
    if isinstance(data, str):
        data = zlib.crc32(data.encode()) & 0x7FFFFFFF
    if is_plain(key, 1) and (isinstance(data, int) or is_plain(data, 0)):
        return _fold_numbers(key, int(data))
    if isinstance(data, int):
        a, b = _mix(key[..., 0] ^ _i32(data)), key[..., 1]
    else:
        a, b = _mix(key[..., 0] ^ data.to(torch.int32)), key[..., 1]
    a = _mix(a ^ b)
    return torch.stack([a, _mix(a + b + _GOLDEN)], dim=-1)


def split(key: Tensor, n: int) -> tuple[Tensor, ...]:
    """``n`` independent keys."""
    return tuple(fold(key, i) for i in range(n))


def bits(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uniform int32 of the given shape, one counter value per element."""
    counter = torch.arange(math.prod(shape), dtype=torch.int32, device=key.device)
    return bits_at(key, counter).reshape(shape)


def bits_at(key: Tensor, counter: Tensor) -> Tensor:
    """The draw number ``counter`` of a key; keys ``[..., 2]`` and counters ``[...]`` broadcast."""
    return _mix(_mix(counter + key[..., 0]) ^ key[..., 1])


def uniform(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform on [0, 1), in multiples of 2**-24; rounded for types narrower than float32."""
    if dtype not in (torch.float32, torch.float64):
        below_one = 1.0 - torch.finfo(dtype).eps
        return uniform(key, shape).to(dtype).clamp_max(below_one)
    return (_shift(bits(key, shape), 8)).to(dtype) * 2.0**-24


def normal(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal, by Box and Muller's transform of two uniforms."""
    if dtype not in (torch.float32, torch.float64):
        return normal(key, shape).to(dtype)
    n = math.prod(shape)
    half = (n + 1) // 2
    u = uniform(key, (2, half), dtype)
    radius = torch.sqrt(-2.0 * torch.log1p(-u[0]))
    angle = (2.0 * math.pi) * u[1]
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[:n].reshape(shape)


def normal_like(key: Tensor, like: Tree) -> Tree:
    """Standard normal numbers in the structure of a tree; each leaf has a key of its own."""
    keys = iter([fold(key, i) for i, _ in enumerate(tree.leaves(like))])
    return tree.map(lambda x: normal(next(keys), tuple(x.shape), x.dtype), like)


def integers(key: Tensor, shape: tuple[int, ...], high: Tensor | int) -> Tensor:
    """Uniform int64 on [0, high), for ``high`` up to 2**31."""
    return scaled(bits(key, shape), high)


def scaled(draws: Tensor, high: Tensor | int) -> Tensor:
    """Raw draws as int64 on [0, high)."""
    return (_shift(draws, 1).to(torch.int64) * high) >> 31


def permutation(key: Tensor, n: int) -> Tensor:
    """A uniformly drawn order of 0 .. n-1."""
    return torch.argsort(bits(key, (n,)), stable=True)


def beta(
    key: Tensor, a: Tensor | float, b: Tensor | float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """One Beta(a, b) number, a ratio of two gammas formed in the log domain."""
    ka, kb = split(key, 2)
    return torch.sigmoid(_log_gamma_variate(ka, a, dtype) - _log_gamma_variate(kb, b, dtype))


def _log_gamma_variate(key: Tensor, a: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Log of a Gamma(a, 1) number: Marsaglia and Tsang's method for a + 1, boosted down to a.

    The rejection loop is unrolled to 16 candidates of which the first accepted is taken; each is
    accepted with probability above 0.95, so all fail once in 10**20 draws.
    """
    kn, ku, kb = split(key, 3)
    d = (a + 1.0) - 1.0 / 3.0
    c = 1.0 / (9.0 * d) ** 0.5
    z = normal(kn, (16,), dtype)
    v = (1.0 + c * z) ** 3
    log_v = torch.log(v.clamp_min(1e-30))
    u = 1.0 - uniform(ku, (16,), dtype)
    accepted = (v > 0) & (torch.log(u) < 0.5 * z * z + d - d * v + d * log_v)
    first = torch.argmax(accepted.to(torch.int32))
    log_boosted = torch.log1p(-uniform(kb, (), dtype)) / a
    return _log(d, z) + log_v.gather(0, first.reshape(1))[0] + log_boosted


def _log(x: Tensor | float, like: Tensor) -> Tensor:
    """Log of a number that may be a Python float or a tensor."""
    return torch.log(x) if isinstance(x, Tensor) else torch.full_like(like[0], math.log(x))


def is_plain(x: Tensor, ndim: int) -> bool:
    """Whether a tensor has ``ndim`` axes and values that can be read without cost: on a CPU,
    outside of vmap and tracing."""
    return x.ndim == ndim and x.device.type == "cpu" and is_eager(x)


def _fold_numbers(key: Tensor, data: int) -> Tensor:
    """:func:`fold` of one key in Python integers: a tenth of the time."""
    a, b = (word & 0xFFFFFFFF for word in key.tolist())
    a = _mix_number(_mix_number(a ^ (data & 0xFFFFFFFF)) ^ b)
    words = [_i32(a), _i32(_mix_number((a + b + _GOLDEN) & 0xFFFFFFFF))]
    return torch.tensor(words, dtype=torch.int32, device=key.device)


def _mix_number(x: int) -> int:
    x = ((x ^ (x >> 16)) * (_M1 & 0xFFFFFFFF)) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * (_M2 & 0xFFFFFFFF)) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _mix_array(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """:func:`_mix` in numpy: half the operations, with less overhead each."""
    x = x ^ (x >> _16)
    x *= _U1
    x ^= x >> _15
    x *= _U2
    x ^= x >> _16
    return x


def _i32(n: int) -> int:
    n &= 0xFFFFFFFF
    return n - (1 << 32) if n >= 1 << 31 else n


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical right shift of int32 (torch's is arithmetic)."""
    return (x >> n) & ((1 << (32 - n)) - 1)


def _mix(x: Tensor) -> Tensor:
    if x.ndim and is_plain(x, x.ndim):
        return torch.from_numpy(_mix_array(x.numpy().view(np.uint32)).view(np.int32))
    x = (x ^ _shift(x, 16)) * _M1
    x = (x ^ _shift(x, 15)) * _M2
    return x ^ _shift(x, 16)
