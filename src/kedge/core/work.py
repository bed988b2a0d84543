"""A client's work in a round: number of steps, batch indices and settings.

They are functions of the seed, the round, the client and its number of samples. So the simulator
draws them for all clients of a cohort at once, and a remote client draws its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.optim import Optimizer
from kedge.core.view import Info, Job, SweepPieces
from kedge.errors import FieldError

if TYPE_CHECKING:
    from kedge.core.bound import Bound

WEIGHTINGS = ("size", "uniform")


@dataclass(frozen=True)
class LocalWork:
    """A client's work in a round: ``steps`` batches, or ``epochs`` converted to steps.

    Batches have exactly ``batch`` rows: an epoch continues into the next permutation, and a client
    with fewer samples than ``batch`` repeats some.

    Raises:
        FieldError: a value is out of range.

    >>> LocalWork(batch=32, epochs=2).steps_for(100)
    7
    """

    batch: int = 32
    steps: int | None = None
    epochs: float = 1.0
    replacement: bool = False  # draw samples with replacement instead of by permutations

    def __post_init__(self) -> None:
        for name in ("batch", "steps"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise FieldError(f"{name} = {value!r} is not a whole number from 1 up")
        if not (isinstance(self.epochs, (int, float)) and 0 < self.epochs < math.inf):
            raise FieldError(f"epochs = {self.epochs!r} is not a number above 0")

    def steps_for(self, size: int) -> int:
        """Local steps of a client with ``size`` samples."""
        if self.steps is not None:
            return self.steps
        return max(1, math.ceil(self.epochs * size / self.batch - 1e-9))


@dataclass(frozen=True)
class Workload:
    """How much each client of a run trains, and from which seed: what a job depends on besides the
    method, the client's data and the request.

    Raises:
        FieldError: ``weighting`` is not known.
    """

    num_clients: int
    examples: int  # training samples of all clients together
    work: LocalWork = LocalWork()
    weighting: str = "size"  # client weights p_k: "size" or "uniform"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.weighting not in WEIGHTINGS:
            known = ", ".join(WEIGHTINGS)
            raise FieldError(f"weighting = {self.weighting!r} is not one of: {known}")

    def share_of(self, size: int) -> float:
        """A client's share of the data relative to a client of mean size, r_k = N n_k / sum of all
        n; 1 for uniform client weights.

        Its mean over all clients is 1, so (1/N) sum_k r_k x_k is the mean of x with the run's
        client weights. It is computed from integers: equal sizes give exactly 1.

        >>> Workload(num_clients=4, examples=80).share_of(30)
        1.5
        """
        return self.num_clients * size / self.examples if self.weighting == "size" else 1.0

    def weight_of(self, size: int) -> float:
        """The weight of a client's update before normalisation."""
        return float(size) if self.weighting == "size" else 1.0

    def lane(self, bound: Bound, client: int, size: int, round: int) -> Lane:
        """The work of a client with ``size`` samples in a round."""
        return Lane(
            client, size, self.work.steps_for(size), self.work, bound.lr(round), bound.optim,
            bound.pull, self.weight_of(size), self.share_of(size),
        )  # fmt: skip


class Lane(NamedTuple):
    """One client of one run, with its work in a round."""

    client: int
    size: int  # number of samples
    steps: int  # local steps
    work: LocalWork
    lr: float
    optim: Optimizer
    pull: float  # of the parts, see Bound.pull
    weight: float  # of its update, before normalisation
    share: float  # of the data, see Workload.share_of


def round_key(root: Tensor, round: int) -> Tensor:
    """The key of all clients of a round, from the root key of a run."""
    return rng.fold(rng.fold(root, "clients"), round)


def client_keys(round_keys: Tensor, clients: Sequence[int]) -> Tensor:
    """Keys ``[K, 2]`` of (seed, round, client), from one :func:`round_key` or one per client."""
    return rng.fold(round_keys, torch.tensor(clients))


def infos(lanes: Sequence[Lane], round: int, dtype: torch.dtype) -> Info:
    """Numbers about a round for each of K lanes, ``[K]`` each."""

    def numbers(name: str) -> Tensor:
        return torch.tensor([getattr(lane, name) for lane in lanes], dtype=dtype)

    ids, steps = torch.tensor([lane.client for lane in lanes]), numbers("steps")
    effective, pulled = _effective(lanes, steps)
    return Info(
        client=ids,
        round=torch.full_like(ids, round),
        lr=numbers("lr"),
        num_steps=steps,
        effective_steps=effective,
        pulled_steps=pulled,
        num_examples=numbers("size"),
        weight=numbers("weight"),
        share=numbers("share"),
    )


def _effective(lanes: Sequence[Lane], steps: Tensor) -> tuple[Tensor, Tensor]:
    """Effective and pulled steps, computed run by run, since optimisers and pulls may differ."""
    runs = [(lane.optim, lane.pull, lane.lr) for lane in lanes]
    starts = [i for i in range(len(runs)) if i == 0 or runs[i] != runs[i - 1]]
    effective, pulled = [], []
    for start, end in zip(starts, [*starts[1:], len(runs)], strict=True):
        optim, pull, lr = runs[start]
        effective.append(optim.effective_steps(steps[start:end]))
        pulled.append(optim.pulled_steps(steps[start:end], lr * pull) if pull else effective[-1])
    return torch.cat(effective), torch.cat(pulled)


def batches(keys: Tensor, lanes: Sequence[Lane]) -> Tensor:
    """Batch indices of K lanes into each client's samples, ``[K, max steps, batch]``, from the keys
    ``[K, 2]`` of :func:`client_keys`; see :func:`batch_indices`."""
    keys, batch = rng.fold(keys, "plan"), lanes[0].work.batch
    sizes, steps = [lane.size for lane in lanes], [lane.steps for lane in lanes]
    flags = [lane.work.replacement for lane in lanes]
    drawn = {flag: batch_indices(keys, sizes, steps, batch, flag) for flag in set(flags)}
    if len(drawn) == 1:
        return drawn[flags[0]]
    replacement = _on(flags, keys.device)[:, None, None]
    return torch.where(replacement, drawn[True], drawn[False])


def take_jobs(jobs: Job, index: tree.Index) -> Job:
    """Jobs of some clients, by index; shared leaves stay shared."""
    stacked = jobs._asdict()
    if not jobs.fields:  # all of one run
        del stacked["anchor"], stacked["sent"]
    return jobs._replace(**tree.take(stacked, index))


def single_jobs(jobs: Job) -> Callable[[int], Job]:
    """:func:`take_jobs` of one client of one run after the other, in a tenth of the time: every
    leaf is split once."""
    assert not jobs.fields
    infos = [Info(*numbers) for numbers in zip(*(x.unbind() for x in jobs.info), strict=True)]
    keys, counts, (rows, mask) = jobs.key.unbind(), jobs.counts.unbind(), jobs.sweep

    def job(i: int) -> Job:
        states, sweep = tree.take(jobs.client, i), SweepPieces(rows[i], mask[i])
        return Job(jobs.anchor, jobs.sent, states, infos[i], keys[i], counts[i], sweep)

    return job


def batch_indices(
    keys: Tensor, sizes: Sequence[int], steps: Sequence[int], batch: int, replacement: bool
) -> Tensor:
    """Batch indices of every client into its own samples, ``[K, max steps, batch]``.

    Without replacement each client runs through one random permutation of its samples after the
    other. All permutations of all clients come out of a single sort: element i of epoch e of
    client k gets the random number of (key k, e, i), and one stable sort by (client, epoch,
    number) shuffles every epoch within its own segment. Rows beyond a client's number of steps are
    not used.
    """
    device, longest = keys.device, max(steps) * batch
    n = _on(sizes, device)
    if replacement:
        at = torch.arange(longest, dtype=torch.int32, device=device)
        local = rng.scaled(rng.bits_at(keys[:, None, :], at), n[:, None])
        return local.reshape(len(sizes), -1, batch)
    epochs = [math.ceil(t * batch / size) for t, size in zip(steps, sizes, strict=True)]
    # lengths are computed on the host, without a synchronisation
    segments, elements = sum(epochs), sum(e * s for e, s in zip(epochs, sizes, strict=True))
    client = _repeated(_on(epochs, device), segments)
    first = torch.cumsum(_on([0, *epochs[:-1]], device), 0)
    epoch = torch.arange(len(client), device=device) - first[client]
    segment = _repeated(n[client], elements)  # of each element
    start = torch.cumsum(n[client], 0) - n[client]
    at = torch.arange(len(segment), device=device) - start[segment]
    epoch_keys = rng.fold(keys[client], epoch)
    draws = rng.bits_at(epoch_keys[segment], at.to(torch.int32)).to(torch.int64) & 0xFFFFFFFF
    order = torch.argsort((segment << 32) | draws, stable=True)
    shuffled = at[order]
    begin = start[first]  # where each client's first epoch starts
    end = begin + _on([e * s for e, s in zip(epochs, sizes, strict=True)], device)
    wanted = begin[:, None] + torch.arange(longest, device=device)
    return shuffled[torch.minimum(wanted, end[:, None] - 1)].reshape(len(sizes), -1, batch)


def _repeated(counts: Tensor, total: int) -> Tensor:
    """``repeat_interleave`` of 0, 1, 2, ... by counts that sum up to a total.

    On a CPU it uses numpy: torch wakes all its threads even for a few elements, which on a machine
    with many cores may take a hundred times as long as the work itself.
    """
    if rng.is_plain(counts, 1):
        return torch.from_numpy(np.repeat(np.arange(len(counts)), counts.numpy()))
    return torch.repeat_interleave(counts, output_size=total)


def _on(values: Sequence[float], device: torch.device) -> Tensor:
    """A tensor on a device. Unlike ``torch.tensor(values, device=...)``, this does not synchronise
    with the GPU."""
    return torch.tensor(values).to(device, non_blocking=True)
