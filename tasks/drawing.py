"""The picture that a finished run leaves in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tasks.charts.canvas import blank, save
from tasks.charts.curves import curves
from tasks.charts.groups import Result
from tasks.charts.looks import looks


def draw_curves(results: Sequence[Result], path: Path) -> None:
    """Draw learning curves: one colour for each mechanism, dashes for each budget, a line for each seed."""
    figure = curves(results, looks(str(result.get("mechanism", "")) for result in results))
    save(figure or blank("curves", "No point of a curve was logged"), path)
