"""``load_model``: the trained model of a run folder."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from kedge.data.datasets import load
from kedge.errors import DataError, KedgeError
from kedge.models import build
from kedge.runs import runner
from kedge.runs.folder import MODEL, Folder


def load_model(folder: str | Path, seed: int | None = None) -> nn.Module:
    """Load the trained global model of a run.

    Args:
        folder: the folder of a run by name (``kedge run``, :func:`run`).
        seed: one of its seeds; None takes the first one.

    Returns:
        The module in evaluation mode, on the CPU.

    Raises:
        KedgeError: the folder holds no run, or one by :func:`fit`, whose model kedge cannot build.
        DataError: the run of this seed is not complete.

    >>> import kedge, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> _ = kedge.run("fedavg", rounds=1, seeds=[0], out=folder)
    >>> kedge.load_model(folder)(torch.zeros(1, 64)).shape
    torch.Size([1, 10])
    """
    _, config = Folder.resume(folder, None)
    seed = config.seeds[0] if seed is None else seed
    path = Path(folder) / f"seed-{seed}" / MODEL
    if config.data == "own":
        raise KedgeError(f"the model of {folder} is your own; load {path} into it with safetensors")
    if not path.is_file():
        raise DataError(f"there is no {path}; the run of seed {seed} is not complete")
    dataset = load(config.data)
    text = runner.auto_model(dataset) if config.model == "auto" else config.model
    module = build(text, dataset.shape, dataset.outputs)
    module.load_state_dict(load_file(path))
    return module.eval()
