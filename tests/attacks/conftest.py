"""Attacks need the small federations and forgeries of ``tests/flower``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "flower"))
