"""FedBR from scratch, in plain PyTorch.

Guo, Tang and Lin, FedBR: Improving Federated Learning on Heterogeneous Data via Local Learning
Bias Reduction, ICML 2023, arXiv:2205.13462.

All clients share pseudo-samples, each the mean of a few samples of one client. At every local
step a projection of the features is first trained to tell local from global features of the
pseudo-samples (max step); then the model is trained on its data, to be undecided about
pseudo-samples (component 1), and to keep their features near the global ones and away from those
of real samples, as seen through the projection (component 2, min step). All random draws come from
outside, so that a run can be compared number by number with another implementation.

    python examples/reference/fedbr.py
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

State = dict[str, Tensor]
Batches = list[tuple[Tensor, Tensor]]


def train(
    body: nn.Module,  # phi: inputs to features
    head: nn.Module,  # omega: features to logits
    projection: nn.Module,  # theta: features to the space where they are compared
    data: list[Tensor],  # [client]: all its inputs
    batches: list[dict[int, Batches]],  # [round][client][step]: (x, y)
    members: list[dict[int, Tensor]],  # [round][client]: rows of its data behind each mean, [B, M]
    owners: list[list[int]],  # [round]: the client of each pseudo-sample, [B]
    mixed: list[dict[int, list[Tensor]]] | None = None,  # [round][client][step]: batch rows [B, K]
    *,
    lr: float = 0.01,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    lam: float = 1.0,
    mu: float = 0.5,
    tau1: float = 2.0,
    tau2: float = 2.0,
) -> tuple[State, State, State]:
    """States of body, head and projection after all rounds; the modules hold the first ones."""
    parts = (body, head, projection)
    state = [copy.deepcopy(part.state_dict()) for part in parts]
    classes = head(body.eval()(data[0][:1])).shape[1]
    for t, round_batches in enumerate(batches):
        # Random sample means (algorithm 2): the server sees means only.
        means = {k: data[k][rows].mean(1) for k, rows in members[t].items()}
        pseudo = torch.stack([means[k][b] for b, k in enumerate(owners[t])])
        uniform = torch.full((len(pseudo), classes), 1 / classes, dtype=pseudo.dtype)

        local_states = []
        for k, client_batches in round_batches.items():
            for part, start in zip(parts, state, strict=True):
                part.load_state_dict(start)
                part.train()
            global_body = copy.deepcopy(body)
            optimizer = torch.optim.SGD(
                [*body.parameters(), *head.parameters()],
                lr=lr,
                momentum=momentum,
                weight_decay=weight_decay,
            )
            ascent = torch.optim.SGD(projection.parameters(), lr=lr, maximize=True)
            for i, (x, y) in enumerate(client_batches):
                x_pseudo, y_pseudo = pseudo, uniform
                if mixed is not None:  # Mixture (eq. 4)
                    rows = mixed[t][k][i]
                    count = rows.shape[1] + 1
                    x_pseudo = (pseudo + x[rows].sum(1)) / count
                    y_pseudo = (uniform + F.one_hot(y, classes)[rows].sum(1)) / count

                z = body(x)
                z_pseudo = quietly(body, x_pseudo)
                z_global = quietly(global_body, x_pseudo).detach()

                # Max step (eq. 2): the features are fixed.
                loss = contrast(projection, z_pseudo.detach(), z_global, z.detach(), tau1, tau2)
                ascent.zero_grad()
                loss.backward()
                ascent.step()

                # Min step (eq. 3): the projection is fixed.
                loss = F.cross_entropy(head(z), y)
                loss = loss + lam * F.cross_entropy(head(z_pseudo), y_pseudo)
                loss = loss + mu * contrast(projection, z_pseudo, z_global, z, tau1, tau2)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            local_states.append([copy.deepcopy(part.state_dict()) for part in parts])
        sizes = torch.tensor([len(data[k]) for k in round_batches], dtype=torch.float64)
        state = [average(list(states), sizes) for states in zip(*local_states, strict=True)]
    return state[0], state[1], state[2]


def contrast(
    projection: nn.Module,
    z_pseudo: Tensor,
    z_global: Tensor,
    z: Tensor,
    tau1: float,
    tau2: float,
) -> Tensor:
    """L_con (eqs. 5-7), where the cosines are multiplied by tau1 and tau2."""
    mine, other, real = projection(z_pseudo), projection(z_global), projection(z)
    f1 = torch.exp(tau1 * F.cosine_similarity(mine, other, dim=1))
    f2 = torch.exp(tau2 * F.cosine_similarity(mine, real, dim=1))
    return -torch.log(f1 / (f1 + f2)).mean()


def quietly(module: nn.Module, x: Tensor) -> Tensor:
    """A pass in training mode that leaves BatchNorm's running statistics alone."""
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    return functional_call(module, buffers, (x,))


def make_projection(features: int, width: int = 256, out: int = 128) -> nn.Sequential:
    """Three linear layers with ReLU in between."""
    return nn.Sequential(
        nn.Linear(features, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, out),
    )


def average(states: list[State], sizes: Tensor) -> State:
    """Mean of all entries, BatchNorm's included, weighted by the clients' sizes."""
    share = sizes / sizes.sum()
    mean = {}
    for name, value in states[0].items():
        total = sum(s * state[name] for s, state in zip(share, states, strict=True))
        assert isinstance(total, Tensor)
        mean[name] = total if value.is_floating_point() else total.round().to(value.dtype)
    return mean


def main(rounds: int = 5, clients: int = 3, local_steps: int = 10, rows: int = 10) -> None:
    """Three clients of random data, each without one of three classes."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
    head, projection = nn.Linear(16, 3), make_projection(16, width=32, out=16)
    centre = 2 * torch.randn(3, 8)
    labels = [torch.tensor([c for c in range(3) if c != k]).repeat(20) for k in range(clients)]
    inputs = [centre[y] + torch.randn(len(y), 8) for y in labels]

    def draw_batches(k: int) -> Batches:
        picks = [torch.randint(len(labels[k]), (rows,)) for _ in range(local_steps)]
        return [(inputs[k][i], labels[k][i]) for i in picks]

    def draw_members() -> dict[int, Tensor]:
        return {k: torch.randint(len(x), (rows, 10)) for k, x in enumerate(inputs)}

    batches = [{k: draw_batches(k) for k in range(clients)} for _ in range(rounds)]
    members = [draw_members() for _ in range(rounds)]
    owners = [torch.randint(clients, (rows,)).tolist() for _ in range(rounds)]
    trained = train(body, head, projection, inputs, batches, members, owners, lr=0.1, lam=0.1)
    body.load_state_dict(trained[0])
    head.load_state_dict(trained[1])
    said = head(body.eval()(torch.cat(inputs))).argmax(1)
    print(f"accuracy {100 * (said == torch.cat(labels)).float().mean():.1f} %")


if __name__ == "__main__":
    main()
