"""The ClientApp: one function to train, one to test."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader

from template_app.task import Net, load_data
from template_app.task import test as test_fn
from template_app.task import train as train_fn

app = ClientApp()


def prepare(message: Message, context: Context) -> tuple[nn.Module, DataLoader, DataLoader]:
    """The model with the weights of a message, and the node's data."""
    config = context.run_config
    net = Net(str(config["hidden"]))
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    path = str(context.node_config["data"]).partition("(")[0]
    return net, *load_data(path, config)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the model on local data."""
    net, batches, _ = prepare(message, context)
    steps, lr = int(context.run_config["local-steps"]), float(message.content["config"]["lr"])
    loss = train_fn(net, batches, steps, lr)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(batches.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the model on local data."""
    net, _, batches = prepare(message, context)
    loss, accuracy = test_fn(net, batches)
    metrics = MetricRecord(
        {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(batches.dataset)}
    )
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)
