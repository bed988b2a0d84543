"""Tables of papers: their recipes, their runs, the records of these, and the comparison.

::

    recipes/PAPER/TABLE/table.toml    what all rows share, see kedge.reproduction.recipes
    recipes/PAPER/TABLE/ROW.toml      one method and the paper's number
    RESULTS/PAPER/TABLE/ROW.seed0.full.json   one record, see kedge.reproduction.records
    RESULTS/.runs/PAPER/TABLE/...     run folders with checkpoints, to resume from
"""
