"""What a part declares about itself: needs, presets, neutral setting, objective and traffic."""

from __future__ import annotations

from typing import Any, ClassVar, Literal


class Declarations:
    """The class attributes of a part; the laws check them."""

    name: ClassVar[str] = ""
    #: Which side it acts on, for the tables: client, server, data, personal, privacy.
    side: ClassVar[str] = "client"
    #: What it computes beyond FedAvg's one gradient a step, in a few words for the tables.
    compute: ClassVar[str] = ""
    #: Needs single clients' updates on the server, not sums: no chunking, no secure aggregation.
    needs_clients: ClassVar[bool] = False
    #: Needs the plain sum of updates over the cohort (``r.sum_delta``) besides their weighted mean.
    needs_sum: ClassVar[bool] = False
    #: Needs the sum of updates times shares (``r.share_delta``), for means over all clients.
    needs_share_sum: ClassVar[bool] = False
    #: Reads the features before the head, so the model must have one.
    needs_features: ClassVar[bool] = False
    #: Works on the head on the server, so the head may not stay on the clients.
    needs_shared_head: ClassVar[bool] = False
    #: Is about BatchNorm, so that a run refuses a model without it.
    needs_batchnorm: ClassVar[bool] = False
    #: Reads how many samples of each class the client has (``v.label_counts``).
    needs_labels: ClassVar[bool] = False
    #: Calls ``v.sweep``.
    needs_sweep: ClassVar[bool] = False
    #: Assumes that the local update is a sum of gradients (control variates): warns with momentum.
    needs_plain_sgd: ClassVar[bool] = False
    #: Reads ``info.pulled_steps``, so every part beside it must tell its ``anchor_pull``.
    needs_pull: ClassVar[bool] = False
    #: Its clients' own models are its product, so results show theirs before the global model's.
    personal_model: ClassVar[bool] = False
    #: Tasks for which it has a meaning.
    tasks: ClassVar[tuple[str, ...]] = ("classification", "multilabel", "regression")
    #: Named settings: ``moon:fedcog`` in a method string.
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    #: A setting under which the method equals FedAvg bit for bit; None where there is none.
    neutral: ClassVar[dict[str, Any] | None] = None
    #: A setting under which the fixed point minimises the run's objective, the mean of the clients'
    #: losses with the run's client weights (law *objective*); None where the part claims no such
    #: thing. ``solves_for`` restricts the claim to the head.
    solves: ClassVar[dict[str, Any] | None] = None
    solves_for: ClassVar[Literal["all", "head"]] = "all"
    #: How much farther from the optimum of two quadratics than FedAvg it may settle (law *stable*).
    strays: ClassVar[float] = 0.0
    #: A setting that is quick on a tiny problem, for the tests of all pairs.
    tiny: ClassVar[dict[str, Any]] = {}
    #: How many numbers the server sends to a client in a round, beyond FedAvg's: a formula in P
    #: (parameters that travel), W and B (all of the network's parameters and buffers), H (the
    #: head's), E (the part's own, from ``extend``), F (features), C (outputs), X (inputs), N
    #: (clients), R (rows of a batch), ``D_cut`` and ``K_cut`` (activations and channels at a cut)
    #: and the part's fields.
    sends: ClassVar[str] = "0"
    #: How many numbers a client uploads in a round, beyond FedAvg's: such a formula.
    uploads: ClassVar[str] = "0"
    #: Names of uploads that count samples, which clipping measures in the client's samples.
    counted: ClassVar[tuple[str, ...]] = ()
    #: How many numbers a client stores from round to round: such a formula.
    keeps: ClassVar[str] = "0"
