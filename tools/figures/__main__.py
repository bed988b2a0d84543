"""Write the figures of the documentation into docs/understand: ``python -m tools.figures``."""

from __future__ import annotations

from pathlib import Path

from tools.figures import drift, network, partitions, round

FOLDER = Path(__file__).parents[2] / "docs" / "understand"


def main() -> None:
    """Write all figures, and print the table of partitions."""
    round.draw(FOLDER)
    drift.draw(FOLDER)
    network.draw(FOLDER)
    partitions.draw_figure(FOLDER)
    print(partitions.table())


if __name__ == "__main__":
    main()
