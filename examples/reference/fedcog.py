"""FedCOG from scratch, in plain PyTorch.

Ye, Du, Ni, Wang and Chen, Fake It Till Make It: Federated Learning with Consensus-Oriented
Generation, ICLR 2024, arXiv:2312.05966.

Every round each client (1) turns noise into samples of the classes it lacks, which the global
model recognises and its own previous model does not, and (2) trains on its real data while it
distils the global model on the generated ones. All random draws come from outside, so that a run
can be compared number by number with another implementation.

    python examples/reference/fedcog.py
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = dict[str, Tensor]
Batches = list[tuple[Tensor, Tensor]]


def train(
    net: nn.Module,
    state: State,
    batches: list[dict[int, Batches]],  # [round][client][step]: (x, y)
    counts: Tensor,  # [clients, classes]: samples of each class
    noise: list[dict[int, Tensor]],  # [round][client]: N inputs to start from
    orders: list[dict[int, list[Tensor]]],  # [round][client][step]: which of them to distil
    *,
    lr: float = 0.01,
    momentum: float = 0.9,
    weight_decay: float = 1e-5,
    start: int = 0,  # the first round that generates
    steps: int = 100,  # of the generation
    lr_generate: float = 0.01,
    lambda_dis: float = 0.1,
    lambda_kd: float | None = None,  # None: weights from the class counts (appendix A.3.2)
    temperature: float = 1.0,
) -> State:
    """The global state after all rounds."""
    previous: dict[int, State] = {}  # each client's last local parameters
    for t, round_batches in enumerate(batches):
        local_states = []
        for k, client_batches in round_batches.items():
            real = counts[k].sum() / (len(counts[k]) * counts[k].max())  # N_real/(N_real + N_gen)
            weights = (real, 1 - real) if lambda_kd is None else (1.0, lambda_kd)
            generated = None
            if t >= start:
                y = complementary_targets(counts[k].tolist(), len(noise[t][k]))
                x = generate(
                    net, state, previous.get(k), noise[t][k], y, steps, lr_generate, lambda_dis
                )
                generated = (x, outputs(net, state, x))
            else:
                weights = (1.0, 0.0)

            net.load_state_dict(state)
            net.train()
            optimizer = torch.optim.SGD(
                net.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay
            )
            for i, (x_real, y_real) in enumerate(client_batches):
                loss = weights[0] * F.cross_entropy(net(x_real), y_real)
                if generated is not None:
                    x, teacher = (value[orders[t][k][i]] for value in generated)
                    kd = F.kl_div(  # KL(teacher || student)
                        F.log_softmax(net(x) / temperature, 1),
                        F.softmax(teacher / temperature, 1),
                        reduction="batchmean",
                    )
                    loss = loss + weights[1] * temperature**2 * kd
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            local_states.append(copy.deepcopy(net.state_dict()))
            previous[k] = {n: p.detach().clone() for n, p in net.named_parameters()}
        state = average(local_states, counts[list(round_batches)].sum(1))
    return state


def complementary_targets(counts: list[float], n: int) -> Tensor:
    """Labels for n samples in proportion to max(d) - d (appendix A.1.1), by largest remainders."""
    lacking = [int(max(counts) - c) for c in counts]
    if not any(lacking):
        lacking = [1] * len(counts)
    quota = [n * d // sum(lacking) for d in lacking]
    rest = [n * d % sum(lacking) for d in lacking]
    by_rest = sorted(range(len(counts)), key=lambda c: (-rest[c], c))
    for c in by_rest[: n - sum(quota)]:
        quota[c] += 1
    return torch.repeat_interleave(torch.tensor(quota))


def generate(
    net: nn.Module,
    state: State,
    previous: State | None,
    noise: Tensor,
    y: Tensor,
    steps: int,
    lr: float,
    lambda_dis: float,
) -> Tensor:
    """Inputs that minimise CE(global model) + lambda (1 - JS(global, previous)), eqs. 1-2.

    The previous model runs with the global BatchNorm statistics; a client without one has no
    disagreement to seek.
    """
    teacher, student = copy.deepcopy(net).eval(), copy.deepcopy(net).eval()
    teacher.load_state_dict(state)
    student.load_state_dict(state | (previous or {}))
    x = noise.clone().requires_grad_()
    optimizer = torch.optim.Adam([x], lr=lr, betas=(0.5, 0.9))
    for _ in range(steps):
        logits = teacher(x)
        loss = F.cross_entropy(logits, y)
        if previous is not None:
            p, q = F.softmax(logits, 1), F.softmax(student(x), 1)
            m = (p + q) / 2
            js = (p * (p / m).log() + q * (q / m).log()).sum(1).mean() / 2
            loss = loss + lambda_dis * (1 - js)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return x.detach()


@torch.no_grad()
def outputs(net: nn.Module, state: State, x: Tensor) -> Tensor:
    """Logits of the global model in evaluation mode."""
    net.load_state_dict(state)
    return net.eval()(x)


def average(states: list[State], sizes: Tensor) -> State:
    """Mean of all entries, BatchNorm's included, weighted by the clients' sizes."""
    share = sizes / sizes.sum()
    mean = {}
    for name, value in states[0].items():
        total = sum(s * state[name] for s, state in zip(share, states, strict=True))
        assert isinstance(total, Tensor)
        mean[name] = total if value.is_floating_point() else total.round().to(value.dtype)
    return mean


def main(rounds: int = 3, clients: int = 3, local_steps: int = 10, samples: int = 16) -> None:
    """Three clients of random data, each without one of three classes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    centre = 2 * torch.randn(3, 8)
    labels = [torch.tensor([c for c in range(3) if c != k]).repeat(20) for k in range(clients)]
    inputs = [centre[y] + torch.randn(len(y), 8) for y in labels]
    counts = torch.stack([torch.bincount(y, minlength=3) for y in labels]).float()

    def draw_batches(k: int) -> Batches:
        picks = [torch.randint(len(labels[k]), (10,)) for _ in range(local_steps)]
        return [(inputs[k][i], labels[k][i]) for i in picks]

    def draw_orders() -> list[Tensor]:
        return [torch.randperm(samples)[:8] for _ in range(local_steps)]

    batches = [{k: draw_batches(k) for k in range(clients)} for _ in range(rounds)]
    noise = [{k: torch.randn(samples, 8) for k in range(clients)} for _ in range(rounds)]
    orders = [{k: draw_orders() for k in range(clients)} for _ in range(rounds)]
    state = train(
        net, copy.deepcopy(net.state_dict()), batches, counts, noise, orders, lr=0.1, steps=20
    )
    said = outputs(net, state, torch.cat(inputs)).argmax(1)
    print(f"accuracy {100 * (said == torch.cat(labels)).float().mean():.1f} %")


if __name__ == "__main__":
    main()
