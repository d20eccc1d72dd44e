"""Reading a run's ``metrics.jsonl``, also while the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class MetricsError(Exception):
    """A line that is none of metrics: which, and why, in one line."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines, each with its whole number ``step``. A metric that is null is missing; a last line without its end
    belongs to a run that goes on, and is left out.

    Raises:
        MetricsError: a line is no JSON object, or has no step.
        OSError: the file cannot be read.
    """
    rows: list[dict[str, Any]] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            rows.append(_row(f"{path.name}, line {number}", line))
    return rows


def _row(where: str, line: bytes) -> dict[str, Any]:
    try:
        row = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MetricsError(f"{where}: no line of metrics: {' '.join(str(error).split())}") from None
    if not isinstance(row.get("step"), int):
        raise MetricsError(f"{where}: no line of metrics: it has no whole number 'step'")
    return {name: value for name, value in row.items() if value is not None}
