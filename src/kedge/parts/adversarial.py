"""Methods that learn client-invariant features adversarially. DANN (Ganin et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from kedge.core import rng, tree
from kedge.core.part import Doc, Out, Part, register
from kedge.core.task import Batch
from kedge.core.tree import Params
from kedge.core.view import Spec, View
from kedge.schema import Count, NotNegative


@register
@dataclass(frozen=True)
class DANN(Part):
    r"""Learn features from which a discriminator cannot predict the client.

    On client k the discriminator D takes descent steps on :math:`\ell_D = CE(D(f(x)), k)`, the
    model on :math:`\ell - \lambda\,\ell_D` (section 4.2: the gradient of the features is reversed
    and scaled by :math:`\lambda`). D is averaged with the model, with one output for every client.

    Ganin et al., Domain-Adversarial Training of Neural Networks, JMLR 2016, arXiv:1505.07818.

    Deviations: clients serve as domains, all of them labelled, and lambda is constant, as in
    FedBR's experiments. Both sides step at the same time, on the same batch, as in the paper;
    ``alternate`` trains D in even steps and the model in odd steps (counted from 0), as FedBR's
    code does, so that the model takes half the steps. The logged term is (1 - lambda) l_D.
    Neutral at: lam = 0, without alternation. Sends / uploads: D.
    """

    lam: Annotated[NotNegative, Doc("weight of the discriminator's loss (FedBR: 0.01 to 1)")] = 0.01
    width: Annotated[Count, Doc("hidden size of the discriminator, three layers")] = 256
    alternate: Annotated[bool, Doc("alternate steps of discriminator and model")] = False

    presets = {"fedbr": {"lam": 0.01, "width": 256, "alternate": True}}
    neutral = {"lam": 0.0, "alternate": False}
    tiny = {"width": 4, "lam": 0.5}
    needs_features = True
    sends = "E"
    uploads = "E"
    compute = "a small discriminator"

    def extend(self, spec: Spec) -> Params:
        sizes = (spec.features, self.width, self.width, spec.num_clients)
        leaves: Params = {}
        for i, key in enumerate(rng.split(spec.key, 3)):
            bound = sizes[i] ** -0.5  # torch's default initialisation of a linear layer
            noise = bound * (rng.uniform(key, (sizes[i + 1], sizes[i] + 1), spec.dtype) * 2 - 1)
            leaves |= {f"weight{i}": noise[:, :-1], f"bias{i}": noise[:, -1]}
        return leaves

    def term(self, v: View, params: Params, batch: Batch, out: Out) -> Tensor:
        own, features = v.own(params), out.features.flatten(1)
        client = v.info.client.expand(len(features))
        discriminator_loss = F.cross_entropy(_discriminate(own, features.detach()), client)
        confusion = F.cross_entropy(_discriminate(tree.detach(own), features), client)
        return discriminator_loss - self.lam * confusion

    def trainable(self, v: View, params: Params) -> dict[str, Tensor | bool]:
        if not self.alternate:
            return {}
        discriminator_step = v.step % 2 == 0
        own = {f"{self.name}/{n}" for n in v.own(params)}
        return {n: discriminator_step if n in own else ~discriminator_step for n in params}


def _discriminate(own: Params, features: Tensor) -> Tensor:
    """Client logits ``[B, N]`` of features ``[B, F]``: three linear layers with ReLU between."""
    x = F.relu(F.linear(features, own["weight0"], own["bias0"]))
    x = F.relu(F.linear(x, own["weight1"], own["bias1"]))
    return F.linear(x, own["weight2"], own["bias2"])
