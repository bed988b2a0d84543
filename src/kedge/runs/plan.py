"""How a run is computed: engine, worker processes, clients at once; decided before it starts."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from kedge.config import Config
from kedge.errors import KedgeError
from kedge.runs.folder import Folder, environment
from kedge.sim.engine import How
from kedge.sim.simulation import Simulation

Make = Callable[[int, How], Simulation]  # (seed, how) -> the simulation of that seed


def choose(config: Config, make: Make, device: torch.device, folder: Folder | None) -> How:
    """How to compute a run; a resumed one goes on as it was started, with as many threads."""
    if folder is not None and (folder.path / "environment.json").exists():
        before = json.loads((folder.path / "environment.json").read_text())
        how = How(**before["how"])
        now = environment(how, device)
        if before["device"] != now["device"]:
            raise KedgeError(
                f"{folder.path} was started on {before['device']!r}, this is {now['device']!r}; "
                "resume it there, or start anew with another --out"
            )
        torch.set_num_threads(before["threads"])
        return how
    engine = config.engine
    if engine == "auto":
        sim = make(config.seeds[0], How("loop"))
        convolves = any(w.ndim > 2 for w in sim.weights.params.values())
        # on a CPU a grouped convolution over clients is slower than one client at a time
        engine = "loop" if convolves and device.type == "cpu" else "vector"
    how = How(engine, workers=config.workers, chunk=config.chunk)
    if folder is not None:
        folder.write("environment.json", json.dumps(environment(how, device)).encode())
    return how
