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
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch.nn.grad import conv2d_input, conv2d_weight

from kedge.engines import convolutions, kernels

assert convolutions  # it defines torch.ops.kedge

K = 10
# name, batch, channels, filters, kernel, stride, padding, side
LAYERS = [
    ("flb 1", 50, 64, 64, 3, 1, 1, 8),
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
    (64, 64, 128, 4, 3), (256, 64, 64, 8, 3), (128, 256, 64, 8, 4),
]  # fmt: skip
WEIGHTS = [  # of the general kernel, and ("row", ...) of that with three taps at once
    (64, 64, 64, 4, 3), (128, 128, 64, 8, 4), (128, 128, 32, 4, 4),
    ("row", 64, 64, 64, 4, 3), ("row", 64, 64, 64, 4, 4), ("row", 64, 64, 32, 4, 4),
    ("row", 64, 64, 128, 4, 3), ("row", 128, 64, 64, 8, 3), ("row", 128, 64, 64, 4, 3),
    ("row", 128, 64, 32, 8, 4), ("row", 64, 128, 64, 8, 3), ("row", 128, 128, 64, 8, 3),
]  # fmt: skip
Blocks = tuple


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
    a, b = x[0].float(), w[0].permute(2, 3, 0, 1).float()
    wanted = {
        "out": F.conv2d(a, b, None, stride, pad),
        "in": conv2d_input(a.shape, b, g[0].float(), stride, pad),
        "in*": conv2d_input(a.shape, b, g[0].float(), stride, pad),
        "w": conv2d_weight(a, b.shape, g[0].float(), stride, pad),
    }
    found = {
        "out": (lambda: kernels.conv(x, w, stride, pads), flop, PRODUCTS),
        "in": (lambda: kernels.conv_inputs(g, back, (side, side), stride, pads), flop, PRODUCTS),
        "in*": (  # by the copy of the weights that the outputs read
            lambda: kernels.conv_inputs(g, w.transpose(3, 4), (side, side), stride, pads),
            flop,
            [],
        ),
        "w": (lambda: kernels.conv_weights(g, x, (r, r), stride, pads), flop, WEIGHTS),
    }
    if c % 16:
        del found["in"], found["in*"]  # the first layer
    for name, (run, *_) in found.items():
        error = (run()[0].float() - wanted[name]).abs().max() / wanted[name].abs().max()
        if not error < 1e-2:
            print(f"{layer[0]} {name}: WRONG by {error:.1e}")
    return found


def sums() -> None:
    """Time the sums of maps over batch and pixels."""
    for batch, c, side in ((64, 64, 28), (64, 128, 14), (32, 64, 32), (32, 512, 4)):
        g = last(K, batch, c, side, side)
        us, size = _microseconds(lambda g=g: torch.ops.kedge.sums(g)), g.numel() * 2
        print(f"sums of {batch}x{c}x{side}x{side}: {us:.1f} us, {size / us / 1e6:.2f} TB/s")


def tune(layer: tuple, timing: bool = True, quick: bool = False) -> dict:
    found: dict = {"layer": layer}
    names = "_blocks", "_weight_blocks", "_row_blocks"
    defaults = [getattr(kernels, n) for n in names]

    def use(found: list) -> None:
        for n, function in zip(names, found, strict=True):
            setattr(kernels, n, function)

    for name, (run, flop, choices) in products(layer).items():
        times: dict[str, float] = {}
        for blocks in [None, *(() if quick else choices)]:
            row = blocks is not None and blocks[0] == "row"
            own = [lambda *a, b=blocks: b] * 2 + [lambda *a, b=blocks, r=row: b[1:] if r else None]
            if row and (layer[3] < blocks[1] or layer[2] % blocks[2] or layer[4] != 3):
                continue
            use(defaults if blocks is None else own)
            try:
                run()
                times[str(blocks)] = _microseconds(run) if timing else 0.0
            except Exception as error:  # noqa: BLE001  (too much shared memory)
                times[str(blocks)] = float("inf")
                if blocks is None:
                    print(layer, name, error)
        use(defaults)
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


def _compile(layer: tuple, quick: bool) -> None:
    tune(layer, timing=False, quick=quick)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compile", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="no other block sizes")
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.compile:
        with multiprocessing.get_context("spawn").Pool(args.compile) as pool:
            pool.map(partial(_compile, quick=args.quick), LAYERS[::-1], chunksize=1)
        return
    rows = [tune(layer, quick=args.quick) for layer in LAYERS]
    sums()
    if args.out:
        Path(args.out).write_text(json.dumps({"clients": K, "rows": rows}))


if __name__ == "__main__":
    main()
