"""Time the convolutions with a client axis on the layers of the papers' networks.

    PYTHONPATH=src python3 bench/conv_tune.py [--compile N] [--out FILE.json]

For every layer and each of its three products (outputs, input gradients, weight gradients), in
bfloat16: microseconds and TFLOP/s with the block sizes of :mod:`kedge.engines.kernels`, and with
the best of others. ``--compile N`` only compiles, in N processes, without timing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from kedge.engines import kernels

K = 10
# name, batch, channels, filters, kernel, stride, padding, side
LAYERS = [
    ("flb stem", 50, 3, 64, 7, 2, 3, 32), ("flb 1", 50, 64, 64, 3, 1, 1, 8),
    ("flb 2a", 50, 64, 128, 3, 2, 1, 8), ("flb 2", 50, 128, 128, 3, 1, 1, 4),
    ("flb 3a", 50, 128, 256, 3, 2, 1, 4), ("flb 3", 50, 256, 256, 3, 1, 1, 2),
    ("flb 4a", 50, 256, 512, 2, 2, 0, 2), ("flb 4", 50, 512, 512, 1, 1, 0, 1),
    ("vgg 1", 32, 64, 128, 3, 1, 1, 16), ("vgg 2", 32, 256, 256, 3, 1, 1, 8),
    ("vgg 3", 32, 512, 512, 3, 1, 1, 4), ("vgg 4", 32, 512, 512, 3, 1, 1, 2),
    ("cifar 1", 128, 64, 64, 3, 1, 1, 32), ("cifar 2", 128, 128, 128, 3, 1, 1, 16),
    ("cifar 3", 128, 256, 256, 3, 1, 1, 8), ("cifar 4", 128, 512, 512, 3, 1, 1, 4),
    ("mnist 3", 64, 128, 128, 3, 1, 1, 14),
]  # fmt: skip
# blocks of pixels, target channels and terms; warps; stages
PRODUCTS = [
    (128, 64, 64, 4, 3), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (64, 64, 64, 4, 4),
    (64, 64, 128, 4, 3), (64, 32, 128, 4, 4), (32, 64, 128, 4, 4), (256, 128, 64, 8, 3),
]  # fmt: skip
WEIGHTS = [
    (64, 64, 64, 4, 3), (64, 128, 64, 4, 3), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3),
    (64, 64, 32, 4, 4), (128, 128, 32, 4, 4),
]  # fmt: skip
Blocks = tuple[int, ...]


def last(*shape: int) -> torch.Tensor:
    """Random maps in channels-last."""
    k, b, c, h, w = shape
    x = torch.randn(k, b, h, w, c, device="cuda", dtype=torch.bfloat16)
    return x.permute(0, 1, 4, 2, 3)


def products(layer: tuple) -> dict[str, tuple[Callable[[], object], float, list[Blocks]]]:
    """The three products of a layer, with their operations and block sizes."""
    _, batch, c, o, r, stride, pad, side = layer
    out = (side + 2 * pad - r) // stride + 1
    x, g = last(K, batch, c, side, side), last(K, batch, o, out, out)
    w = torch.randn(K, r, r, o, c, device="cuda", dtype=torch.bfloat16)
    back = w.transpose(3, 4).contiguous()
    flop = 2.0 * K * batch * out * out * r * r * c * o
    pads = (pad, pad)
    found = {
        "out": (lambda: kernels.conv(x, w, stride, pads), flop, PRODUCTS),
        "in": (lambda: kernels.conv_inputs(g, back, (side, side), stride, pads), flop, PRODUCTS),
        "w": (lambda: kernels.conv_weights(g, x, (r, r), stride, pads), flop, WEIGHTS),
    }
    if c % 16:
        del found["in"]  # the first layer
    return found


def tune(layer: tuple, timing: bool = True) -> dict:
    found: dict = {"layer": layer}
    defaults = kernels._blocks, kernels._weight_blocks
    for name, (run, flop, choices) in products(layer).items():
        times: dict[str, float] = {}
        for blocks in [None, *choices]:
            kernels._blocks, kernels._weight_blocks = defaults
            if blocks is not None:
                kernels._blocks = lambda *a, b=blocks: b
                kernels._weight_blocks = lambda *a, b=blocks: b
            try:
                run()
                times[str(blocks)] = _microseconds(run) if timing else 0.0
            except Exception as error:  # noqa: BLE001  (too much shared memory)
                times[str(blocks)] = float("inf")
                if blocks is None:
                    print(layer, name, error)
        kernels._blocks, kernels._weight_blocks = defaults
        best = min(times, key=times.__getitem__)
        found[name] = {"flop": flop, "times": times, "best": best}
        if timing:
            own = times["None"]
            print(
                f"{layer[0]:9} {name:4} {own:7.1f} us {flop / own / 1e6:6.0f} TFLOP/s; best "
                f"{times[best]:7.1f} us {best}"
            )
    return found


def _microseconds(run: Callable[[], object]) -> float:
    """By replays of a graph of ten."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            run()
    return triton.testing.do_bench(graph.replay, warmup=3, rep=12, return_mode="median") * 100


def _compile(layer: tuple) -> None:
    tune(layer, timing=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compile", type=int, default=0)
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.compile:
        with multiprocessing.get_context("spawn").Pool(args.compile) as pool:
            pool.map(_compile, LAYERS, chunksize=1)
        return
    rows = [tune(layer) for layer in LAYERS]
    if args.out:
        Path(args.out).write_text(json.dumps({"clients": K, "rows": rows}))


if __name__ == "__main__":
    main()
