"""Rounds per second of kedge and of other ways to run them.

``python -m bench`` times every workload for the engines of kedge and for rivals: a plain PyTorch
loop (:mod:`bench.speed.eager`), pfl (:mod:`bench.speed.pfl_rival`) and Flower's simulation
(:mod:`bench.speed.flower_rival`). They take turns round by round, so that a change of the machine's
speed affects all of them alike.
"""
