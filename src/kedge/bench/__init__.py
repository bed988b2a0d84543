"""Speed: rounds per second of kedge and of other ways to run them.

``kedge bench`` times every workload for the engines of kedge and for rivals: a plain PyTorch loop
(:mod:`kedge.bench.eager`), pfl (:mod:`kedge.bench.pfl_rival`) and Flower's simulation
(:mod:`kedge.bench.flower_rival`). They take turns round by round, so that a change of the machine's
speed affects all of them alike.
"""
