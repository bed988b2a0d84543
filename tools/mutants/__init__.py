"""Mutation testing: change one spot of the source, and see whether a test notices.

``make mutants`` takes 20 seeded mutants of every file of ``core`` and ``parts`` and the faults in
``named.toml``, runs the tests that touch the changed line, and writes ``record.json`` and
``docs/mutation.md``. A mutant that no test notices is a *survivor*: a fault of this kind could be
in the source today. ``equivalent.toml`` names the survivors that compute the same.

Why a script of its own. mutmut 3.8.1, tried on ``parts/proximal.py``, makes 92 mutants there and
runs all of them or those given by name: it draws no sample of a fixed size from a seed, and it
leaves class bodies (defaults, presets, declarations) and properties as they are. It would replace
the forks and the choice of tests (``child``, ``cover``, ``trial``), but not the sample, the named
faults, the equivalent mutants or the page. cosmic-ray starts a Python per mutant and runs the same
tests for each: 3 s of imports and minutes of tests, where a forked child needs 1 s and a few tests.

How it works. The process that waits imports torch, pytest and all other libraries, but nothing of
the package under test. Each mutant is a fork of it, whose import of one module compiles the changed
source. So nothing is patched, and no cache, registry or class of the original can survive in it.
The tests that run are those that touched the line in one traced run of the suite (kept in
``.mutants``), quick ones first, up to ``--cap`` seconds of test time.
"""
