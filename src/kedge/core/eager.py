"""Whether a tensor's values can be read now.

Inside ``vmap``, ``grad`` or a trace they cannot. Code with a fast path for plain values (random
keys, losses) calls :func:`is_eager`. The default predicate uses public functions of torch; engines
set a faster one, which also detects their own traces.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def is_unwrapped(x: Tensor) -> bool:
    """Whether no transform of ``torch.func`` wraps ``x``."""
    alias = x.view_as(x)
    return torch.func.debug_unwrap(alias) is alias


_predicate: Callable[[Tensor], bool] = is_unwrapped


def is_eager(x: Tensor) -> bool:
    """Whether the values of ``x`` can be read: outside of ``vmap``, ``grad`` and traces."""
    return _predicate(x)


def set_predicate(predicate: Callable[[Tensor], bool]) -> Callable[[Tensor], bool]:
    """Replace the predicate of :func:`is_eager`; return the previous one."""
    global _predicate
    before, _predicate = _predicate, predicate
    return before
