"""FLBoost in plain PyTorch, from its paper: federated learning with fine-tuning on the server.

"FLBoost: On-the-Fly Fine-Tuning Boosts Federated Learning via Data-Free Distillation" (anonymous
submission), published in another form as Zhang, Shen, Ding, Tao and Duan, "Fine-Tuning Global Model
via Data-Free Knowledge Distillation for Non-IID Federated Learning", CVPR 2022, arXiv:2203.09249.

One round:
1. Each client of the cohort trains the global model on its own data by plain SGD, corrected by
   SCAFFOLD's control variates where asked for (Karimireddy et al., ICML 2020, arXiv:1910.06378).
2. The server averages the clients' models and control variates.
3. The server fine-tunes the mean against the clients' models on images that a generator makes. The
   generator looks for images on which mean and clients disagree, the mean learns to agree.

Nothing here is drawn at random: the initial model and generator, every client's batches, and the
noise and labels of every round are arguments, so that a run can be repeated number by number.

The paper and the released code differ. By default this file follows the code: the mean minimises
KL(client || mean), divided by the number of classes; the generator maximises the absolute
difference of logits, the clients' being constants, and takes one step per client. ``printed=True``
follows the paper: both play with KL(mean || client), and the generator takes one step on the sum
over clients, with gradients through all models.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Round(NamedTuple):
    """What happens in one round: who takes part, on which batches, and the server's draws."""

    clients: list[int]
    batches: list[list[tuple[Tensor, Tensor]]]  # of each of them, one (x, y) per local step
    z: Tensor  # noise, [I, B, d]
    labels: Tensor  # [I, B], distributed as p_t(y), the labels of the cohort's data


class Generator(nn.Module):
    """Noise and label to an image (Table 5a), in the space of normalised inputs.

    Two convolutions double the size of a small map; both are followed by BatchNorm, so they need no
    bias. The last BatchNorm, without scale and shift, gives the images mean 0 and variance 1; it is
    not in the paper.
    """

    def __init__(
        self,
        noise: int,
        classes: int,
        channels: int,
        side: int,
        width: int,
        final_norm: bool = True,
    ) -> None:
        super().__init__()
        self.classes, self.first = classes, side // 4
        self.from_noise = nn.Linear(noise, width // 2 * self.first**2)
        self.from_label = nn.Linear(classes, width // 2 * self.first**2)
        self.bn0 = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width // 2, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width // 2)
        self.conv3 = nn.Conv2d(width // 2, channels, 3, padding=1)
        self.bn3 = nn.BatchNorm2d(channels, affine=False) if final_norm else nn.Identity()

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        one_hot = F.one_hot(y, self.classes).to(z.dtype)
        x = torch.cat([self.from_noise(z), self.from_label(one_hot)], 1)
        x = self.bn0(x.reshape(len(z), -1, self.first, self.first))
        x = F.leaky_relu(self.bn1(self.conv1(F.interpolate(x, scale_factor=2))), 0.2)
        x = F.leaky_relu(self.bn2(self.conv2(F.interpolate(x, scale_factor=2))), 0.2)
        return self.bn3(torch.tanh(self.conv3(x)))


def flboost(
    model: nn.Module,
    generator: Generator,
    rounds: list[Round],
    counts: Tensor,  # samples of each class on each client, [N, C]
    *,
    scaffold: bool = True,
    printed: bool = False,
    lr: float = 0.1,
    generator_lr: float = 0.01,
    decay: float = 0.998,
    weight_decay: float = 1e-3,
    generator_steps: int = 1,
    student_steps: int = 5,
    lambda_cls: float = 1.0,
    lambda_r: float = 1.0,
) -> tuple[nn.Module, Generator, list[Tensor]]:
    """Algorithm 1. Returns the global model, the generator and SCAFFOLD's server state."""
    model, generator = copy.deepcopy(model), copy.deepcopy(generator)
    num_clients = len(counts)
    s = [torch.zeros_like(p) for p in model.parameters()]
    s_k = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(num_clients)]

    for t, now in enumerate(rounds):
        step = lr * decay**t
        locals_, changes = [], []
        for k, batches in zip(now.clients, now.batches, strict=True):
            local = train_client(model, batches, step, weight_decay, s, s_k[k])
            if scaffold:  # Algorithm 3, line 6, over the number of steps and their size
                new = [
                    c_k - c + (w - w_k) / (len(batches) * step)
                    for c_k, c, w, w_k in zip(s_k[k], s, params(model), params(local), strict=True)
                ]
                changes.append([a - b for a, b in zip(new, s_k[k], strict=True)])
                s_k[k] = new
            locals_.append(local)

        model = average(locals_)  # Algorithm 2, lines 1-2
        for change in changes:
            s = [c + d / num_clients for c, d in zip(s, change, strict=True)]
        fine_tune(
            model,
            generator,
            locals_,
            counts[now.clients],
            now.z,
            now.labels,
            step,
            generator_lr * decay**t,
            weight_decay,
            generator_steps,
            student_steps,
            lambda_cls,
            lambda_r,
            printed,
        )
    return model, generator, s


def train_client(
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    lr: float,
    weight_decay: float,
    s: list[Tensor],
    s_k: list[Tensor],
) -> nn.Module:
    """Algorithm 3: local SGD on g - s_k + s. With s = s_k = 0 this is FedAvg's client."""
    local = copy.deepcopy(model).train()
    sgd = torch.optim.SGD(local.parameters(), lr=lr, weight_decay=weight_decay)
    for x, y in batches:
        sgd.zero_grad()
        F.cross_entropy(local(x), y).backward()
        for p, c, c_k in zip(local.parameters(), s, s_k, strict=True):
            assert p.grad is not None
            p.grad += c - c_k
        sgd.step()
    return local


def fine_tune(
    student: nn.Module,
    generator: Generator,
    teachers: list[nn.Module],
    counts: Tensor,  # of the cohort, [K, C]
    z: Tensor,
    labels: Tensor,
    lr: float,
    generator_lr: float,
    weight_decay: float,
    generator_steps: int,
    student_steps: int,
    lambda_cls: float,
    lambda_r: float,
    printed: bool,
) -> None:
    """Algorithm 2, lines 3-13: student and generator play against each other, in place."""
    weight = counts / counts.sum(0).clamp_min(1)  # a_{k,y} (eq. 6), [K, C]
    adam = torch.optim.Adam(generator.parameters(), lr=generator_lr)  # afresh in every round
    sgd = torch.optim.SGD(student.parameters(), lr=lr, weight_decay=weight_decay)
    for teacher in teachers:
        teacher.eval().requires_grad_(False)
    # one step on all clients, or one per client, those with most samples of the first class first
    everyone = list(range(len(teachers)))
    by_counts = sorted(everyone, key=lambda k: counts[k].tolist(), reverse=True)
    groups = [everyone] if printed else [[k] for k in by_counts]
    classes = counts.shape[1]

    for noise, y in zip(z, labels, strict=True):
        a = weight[:, y]  # [K, B]

        student.eval()
        generator.train()
        for group in groups * generator_steps:
            x = generator(noise, y)
            said = student(x)
            loss = lambda_r * len(group) / len(teachers) * diversity(noise, x)
            for k in group:
                known = teachers[k](x)
                ce = F.cross_entropy(known, y, reduction="none")
                if printed:
                    md = (a[k] * divergence(said, known)).mean()
                    cls = (a[k] * ce).mean()
                else:
                    md = (a[k] * (said - known.detach()).abs().mean(1)).mean()
                    cls = a[k].mean() * ce.mean()
                loss = loss - md + lambda_cls * cls
            adam.zero_grad()
            loss.backward()
            adam.step()

        student.train()
        generator.eval()
        with torch.no_grad():
            x = generator(noise, y)
            answers = [teacher(x) for teacher in teachers]
        for _ in range(student_steps):
            said = student(x)
            loss = torch.zeros((), dtype=said.dtype)
            for k, known in enumerate(answers):  # L_md (eq. 3)
                if printed:
                    loss = loss + (a[k] * divergence(said, known)).mean()
                else:
                    loss = loss + (a[k] * divergence(known, said)).mean() / classes
            sgd.zero_grad()
            loss.backward()
            sgd.step()


def divergence(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) of two batches of logits, [B]."""
    log_p, log_q = F.log_softmax(first, 1), F.log_softmax(second, 1)
    return (log_p.exp() * (log_p - log_q)).sum(1)


def diversity(z: Tensor, x: Tensor) -> Tensor:
    """L_r: small where images are as different as their noise (Zhu et al. 2021)."""
    x = x.flatten(1)
    between_z = ((z[:, None] - z[None]) ** 2).mean(2)  # [B, B]
    between_x = (x[:, None] - x[None]).abs().mean(2)
    return torch.exp(-(between_z * between_x).mean())


def average(models: list[nn.Module]) -> nn.Module:
    """The plain mean of all parameters and BatchNorm statistics."""
    mean = copy.deepcopy(models[0])
    states = [m.state_dict() for m in models]
    with torch.no_grad():
        for name, value in mean.state_dict().items():
            stacked = torch.stack([s[name].double() for s in states]).mean(0)
            value.copy_(stacked if value.is_floating_point() else stacked.round())
    return mean


def params(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def main(rounds: int = 8) -> float:
    """Four clients with two classes of noisy patterns each; returns the accuracy in percent."""
    torch.manual_seed(0)
    classes, side, per_client = 4, 8, 40
    patterns = torch.randn(classes, 1, side, side)

    def sample(y: Tensor) -> tuple[Tensor, Tensor]:
        return patterns[y] + torch.randn(len(y), 1, side, side), y

    own = [torch.tensor([k, (k + 1) % classes]).repeat(per_client // 2) for k in range(classes)]
    data = [sample(y) for y in own]
    counts = torch.stack([torch.bincount(y, minlength=classes) for y in own]).float()
    test_x, test_y = sample(torch.arange(classes).repeat(100))

    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, classes),
    )
    generator = Generator(noise=8, classes=classes, channels=1, side=side, width=16)
    accuracy = 0.0
    for name in ("SCAFFOLD", "SCAFFOLD+FLBoost"):
        torch.manual_seed(1)
        plan = []
        for _ in range(rounds):
            orders = [torch.randperm(per_client).split(10) for _ in data]
            batches = [[(x[i], y[i]) for i in o] for (x, y), o in zip(data, orders, strict=True)]
            steps = 3 if name.endswith("FLBoost") else 0
            labels = torch.arange(classes).repeat(5 * steps)[torch.randperm(20 * steps)]
            z = torch.randn(steps, 20, 8)
            plan.append(Round(list(range(classes)), batches, z, labels.reshape(steps, 20)))
        final, _, _ = flboost(model, generator, plan, counts)
        with torch.no_grad():
            right = final.eval()(test_x).argmax(1) == test_y
        accuracy = 100 * right.float().mean().item()
        print(f"{name}: {accuracy:.1f} % after {rounds} rounds")
    return accuracy


if __name__ == "__main__":
    main()
