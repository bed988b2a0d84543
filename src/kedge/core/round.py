"""The server's view of a round, as a part sees it."""

from __future__ import annotations

from torch import Tensor

from kedge.core import rng
from kedge.core.model import Model
from kedge.core.part import Part
from kedge.core.steps import REFERENCE, Function, Setting, Step, Steps, check_method
from kedge.core.tree import Params, Tree, Weights
from kedge.core.update import NO_WEIGHTS, Totals
from kedge.core.view import Noise, Spec
from kedge.errors import HookError


class Round(Setting):
    """What a part sees on the server at the end of a round: reduced values only."""

    def __init__(
        self,
        *,
        part: Part,
        model: Model,
        spec: Spec,
        round: int,
        lr: float,
        key: Tensor,
        phase: str,
        anchor: Weights,
        server: Tree,
        uploads: Tree,
        totals: Totals,
        mean: Weights = NO_WEIGHTS,
        noise: Noise = rng.normal_like,
        steps: Steps = REFERENCE,
    ) -> None:
        super().__init__(part, model, spec, steps)
        self._totals, self._mean, self._noise = totals, mean, noise
        self.round, self.lr, self.phase = round, lr, phase
        #: Randomness of this (seed, round, part).
        self.key = rng.fold(key, part.name)
        #: The weights before this round's update.
        self.anchor = anchor
        #: The part's own state.
        self.server = server
        #: The part's own uploads, each reduced by its declared reduction.
        self.uploads = uploads
        #: Number of clients in the federation.
        self.num_clients = spec.num_clients
        #: Number of clients in this round.
        self.cohort = len(totals.clients)

    @property
    def weight(self) -> Tensor:
        """Sum of the client weights over the cohort."""
        return self._totals.summed.weight

    @property
    def mean_delta(self) -> Params:
        """Weighted mean of the clients' updates."""
        return self._mean.params

    @property
    def sum_delta(self) -> Params:
        """Plain sum of the clients' updates over the cohort."""
        if not self._part.needs_sum:
            raise HookError(f"{self._part.name} reads r.sum_delta: declare needs_sum = True")
        return self._totals.summed.plain_delta

    @property
    def share_delta(self) -> Params:
        """Sum of the clients' updates over the cohort, each times its share r_k. Divided by the
        number of all clients N, it is the cohort's part of a mean over all clients."""
        if not self._part.needs_share_sum:
            raise HookError(
                f"{self._part.name} reads r.share_delta: declare needs_share_sum = True"
            )
        return self._totals.summed.share_delta

    @property
    def sums(self) -> Tree:
        """Sum over the cohort of what ``contribute`` returned."""
        return self._totals.summed.contribution

    @property
    def clients(self) -> Weights:
        """Every client's trained weights, stacked along a first axis, in the cohort's order."""
        if not self._part.needs_clients:
            raise HookError(f"{self._part.name} reads r.clients: declare needs_clients = True")
        return self._totals.stacked.weights

    @property
    def client_weights(self) -> Tensor:
        """Every client's weight in the mean, ``[K]``, in the order of :attr:`clients`."""
        if not self._part.needs_clients:
            raise HookError(
                f"{self._part.name} reads r.client_weights: declare needs_clients = True"
            )
        return self._totals.stacked.weight

    def noise(self, like: Tree) -> Tree:
        """Standard normal numbers in the shapes of a tree, for ``receive``; see ``v.noise``."""
        return self._noise(self.key, like)

    def iterate(self, step: Step, carry: Tree, xs: Tree, given: Tree, borrow: bool = False) -> Tree:
        """Take one step for every row of ``xs``.

        Args:
            step: a method ``step(setting, given, carry, x)`` of the part that returns the next
                carry, of the same names and shapes; it must be pure.
            carry: what the steps change.
            xs: the steps' own inputs, leaves ``[steps, ...]``.
            given: inputs that all steps share.
            borrow: the next call with this step may overwrite the result, so it is not copied.

        Returns:
            The last carry.

        Example::

            weights = r.iterate(self._student_step, weights, {"x": x, "y": y}, {"lr": lr})
        """
        check_method(self._part.name, step, {"given": given, "xs": xs, "carry": carry})
        return self._steps.iterate(self._setting(), step, carry, xs, given, borrow)

    def apply(self, function: Function, given: Tree, borrow: bool = False) -> Tree:
        """``function(setting, given)`` of a method of the part; it must be pure.

        With ``borrow``, the next call with this method may overwrite the result, so neither it nor
        what reads it copies it.
        """
        check_method(self._part.name, function, given)
        return self._steps.apply(self._setting(), function, given, borrow)

    def keep(self, result: Tree) -> Tree:
        """A borrowed result in memory of its own, as the part's state must be."""
        return self._steps.keep(result)

    def _setting(self) -> Setting:
        model = self._steps.prepare(self.model, self.model.precision)
        return Setting(self._part, model, self.spec, self._steps)
