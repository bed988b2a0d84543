"""Flower's simulation of federated averaging on a workload. Needs ``flwr[simulation]``.

It uses a ServerApp, a ClientApp, Flower's FedAvg strategy and its Ray backend, one CPU per client.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from bench.speed.eager import draw_batches, train
from bench.speed.workloads import Workload

Send = Callable[[dict[str, Any]], None]  # sends an answer to the parent process
NO_REPLY = "no client of the round replied"


def serve(work: Workload, device: str, precision: str, requests: Iterator[str], send: Send) -> None:
    """Run one round for every request, and send its seconds."""
    from flwr.app import ArrayRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    device = device.partition(":")[0]  # Ray makes one GPU visible to each client
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def train_client(message: Any, context: Any) -> Any:
        return _reply(work, device, precision, message, int(context.node_config["partition-id"]))

    @server_app.main()
    def main(grid: Any, context: Any) -> None:
        strategy = FedAvg(
            fraction_train=work.cohort / work.clients,
            fraction_evaluate=0.0,
            min_train_nodes=work.cohort,
            min_available_nodes=work.clients,
        )
        first = ArrayRecord(work.module().state_dict())
        arrays = strategy.start(grid=grid, initial_arrays=first, num_rounds=1).arrays  # Ray starts
        if not arrays:
            send({"error": NO_REPLY})
            return
        send({"ready": True, "versions": {"flwr": version("flwr"), "ray": version("ray")}})
        for _ in requests:
            start = time.perf_counter()
            found = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=1).arrays
            seconds = time.perf_counter() - start
            if not found:
                send({"error": NO_REPLY})
                return
            arrays = found
            # the sum of all weights shows that they change
            total = sum(float(v.double().sum()) for v in found.to_torch_state_dict().values())
            send({"seconds": seconds, "total": total})

    resources = {"num_cpus": 1.0, "num_gpus": 0.0}
    if device != "cpu":  # one client per CPU core at a time
        resources["num_gpus"] = 1 / (os.cpu_count() or 1)
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=work.clients,
        backend_config={"client_resources": resources},
    )


def _reply(work: Workload, device: str, precision: str, message: Any, client: int) -> Any:
    """The reply of a client: its trained weights, or the received ones for an idle workload."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    arrays, metrics = message.content["arrays"], MetricRecord({"num-examples": work.samples})
    if not work.idle:
        state = arrays.to_torch_state_dict()
        arrays = ArrayRecord(trained(work, device, precision, client, state))
    content = RecordDict({"arrays": arrays, "metrics": metrics})
    return Message(content=content, reply_to=message)


def trained(
    work: Workload, device: str, precision: str, client: int, state: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The state dict of a client after its local training from ``state``."""
    net, (x, y) = _model_and_data(work, device)
    net.load_state_dict(state)
    batches = draw_batches(work, client, torch.Generator().manual_seed(client))
    train(net, x, y, batches.to(device), work, precision)
    return net.state_dict()


@lru_cache(maxsize=1)
def _model_and_data(work: Workload, device: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Model and data of a worker process, cached."""
    torch.set_num_threads(1)
    return work.module().to(device), work.normalised(device)
