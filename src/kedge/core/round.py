"""The server's view of a round, as a part sees it."""

from __future__ import annotations

from torch import Tensor

from kedge.core import rng
from kedge.core.model import Model
from kedge.core.part import Part
from kedge.core.steps import REFERENCE, Function, ServerView, Step, Steps, check_method
from kedge.core.tree import Params, Tree, Weights
from kedge.core.update import NO_WEIGHTS, Totals
from kedge.core.view import Noise, Spec
from kedge.errors import HookError


class Round(ServerView):
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
        self._check_declared("sum_delta", "needs_sum")
        return self._totals.summed.plain_delta

    @property
    def share_delta(self) -> Params:
        """Sum of the clients' updates over the cohort, each times its share r_k. Divided by the
        number of all clients N, it is the cohort's part of a mean over all clients."""
        self._check_declared("share_delta", "needs_share_sum")
        return self._totals.summed.share_delta

    @property
    def sums(self) -> Tree:
        """Sum over the cohort of what ``contribute`` returned."""
        return self._totals.summed.contribution

    @property
    def clients(self) -> Weights:
        """Every client's trained weights, stacked along a first axis, in the cohort's order."""
        self._check_declared("clients", "needs_clients")
        return self._totals.stacked.weights

    @property
    def client_weights(self) -> Tensor:
        """Every client's weight in the mean, ``[K]``, in the order of :attr:`clients`."""
        self._check_declared("client_weights", "needs_clients")
        return self._totals.stacked.weight

    def _check_declared(self, what: str, need: str) -> None:
        if not getattr(self._part, need):
            raise HookError(f"{self._part.name} reads r.{what}: declare {need} = True")

    def noise(self, like: Tree) -> Tree:
        """Standard normal numbers in the shapes of a tree, for ``receive``; see ``v.noise``."""
        return self._noise(self.key, like)

    def iterate(self, step: Step, carry: Tree, xs: Tree, given: Tree, borrow: bool = False) -> Tree:
        """Take one step for every row of ``xs``.

        Args:
            step: a method ``step(view, given, carry, x)`` of the part that returns the next
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
        return self._steps.iterate(self._view(), step, carry, xs, given, borrow)

    def apply(self, function: Function, given: Tree, borrow: bool = False) -> Tree:
        """``function(view, given)`` of a method of the part; it must be pure.

        With ``borrow``, the next call with this method may overwrite the result, so neither it nor
        what reads it copies it.
        """
        check_method(self._part.name, function, given)
        return self._steps.apply(self._view(), function, given, borrow)

    def keep(self, result: Tree) -> Tree:
        """A borrowed result in memory of its own, as the part's state must be."""
        return self._steps.keep(result)

    def _view(self) -> ServerView:
        model = self._steps.prepare(self.model, self.model.precision)
        return ServerView(self._part, model, self.spec, self._steps)
