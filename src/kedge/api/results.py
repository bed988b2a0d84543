"""The results of a comparison or a sweep: a list that prints as a table."""

from __future__ import annotations

from kedge.report.tables import results_table
from kedge.runs.result import Result
from kedge.runs.validation import data_of_choice, leader


class Results(list[Result]):
    """One result per method or setting; ``print(results)`` shows the table of the command line.

    >>> import kedge
    >>> results = kedge.compare(["fedavg", "scaffold"], rounds=2, seeds=[0])
    >>> isinstance(results, list), results.best in results
    (True, True)
    """

    @property
    def best(self) -> Result:
        """The best one: by validation data where there are some, otherwise by the last test.

        Yardsticks, such as training on pooled data, do not compete.
        """
        return leader(self)

    def __str__(self) -> str:
        if not self:
            return "no results"
        is_sweep = bool(self[0].values)
        table = str(results_table(self))
        if is_sweep or sum(not result.yardstick for result in self) < 2:
            return table
        return f"{table}\n{self.best.name}: {data_of_choice(self)}"
