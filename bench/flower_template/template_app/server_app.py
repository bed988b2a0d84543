"""The ServerApp: FedAvg, with a clock and a scale around it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from template_app.task import Net

app = ServerApp()


class TimedFedAvg(FedAvg):
    """FedAvg that notes when rounds end, and keeps the messages of the last round."""

    def __init__(self, nodes: int, fraction_train: float, fraction_evaluate: float) -> None:
        super().__init__(
            fraction_train=fraction_train,
            fraction_evaluate=fraction_evaluate,
            min_train_nodes=nodes,
            min_evaluate_nodes=nodes,
            min_available_nodes=nodes,
        )
        self.ends: list[float] = []
        self.messages: dict[str, list[Message]] = {}
        self.failures = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if not self.ends:
            self.ends.append(time.time())  # the first round starts
        found = list(super().configure_train(server_round, arrays, config, grid))
        self.messages["train down"] = found
        return found

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        self.messages["train up"] = replies = list(replies)
        self.failures += sum(reply.has_error() for reply in replies)
        return super().aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        found = list(super().configure_evaluate(server_round, arrays, config, grid))
        self.messages["evaluate down"] = found
        return found

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        self.messages["evaluate up"] = replies = list(replies)
        self.failures += sum(reply.has_error() for reply in replies)
        found = super().aggregate_evaluate(server_round, replies)
        self.ends.append(time.time())
        return found


def size(message: Message) -> int:
    """Bytes of all objects that travel for a message."""
    return sum(len(one.deflate()) for one in get_all_nested_objects(message).values())


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with FedAvg, and save the model."""
    config = context.run_config
    torch.manual_seed(0)
    net = Net(str(config["hidden"]))
    strategy = TimedFedAvg(
        int(config["min-nodes"]),
        float(config["fraction-train"]),
        float(config["fraction-evaluate"]),
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(net.state_dict()),
        train_config=ConfigRecord({"lr": float(config["lr"])}),
        num_rounds=int(config["num-server-rounds"]),
    )
    if not config["out"]:
        return
    out = Path(str(config["out"]))
    torch.save(result.arrays.to_torch_state_dict(), out / "final_model.pt")
    found = {
        "ends": strategy.ends,
        "accuracy": [
            100 * float(metrics["eval_acc"])
            for _, metrics in sorted(result.evaluate_metrics_clientapp.items())
        ],
        "bytes": {name: sum(map(size, some)) for name, some in strategy.messages.items()},
        "failures": strategy.failures,
    }
    (out / "template.json").write_text(json.dumps(found))
