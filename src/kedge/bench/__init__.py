"""``kedge bench``: rounds per second, beside what one would otherwise run.

Every workload is timed in one run for kedge's engines and for rivals: a plain PyTorch loop
(:mod:`kedge.bench.eager`), pfl (:mod:`kedge.bench.pfl_rival`) and Flower's simulation
(:mod:`kedge.bench.flower_rival`), round by round in turn, so that a machine that gets slower or
faster meanwhile does so for all of them.
"""
