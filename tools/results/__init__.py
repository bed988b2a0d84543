"""The page of results, docs/results.md, written from the records in docs/results."""
