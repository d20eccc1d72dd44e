"""What a run shows while it goes on: a live panel on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

REFRESH_PER_S = 4
UNKNOWN = "–"


class ProgressDisplay:
    """A context manager that is fed with plain dicts; what a dict does not hold keeps its last value.

    Known keys: ``phase`` (text), ``step``, ``reward`` (mean of the last batch), ``pass_at_1`` (held out, the last
    evaluation), ``tokens_per_s``, ``staleness`` (mean of the last batch), ``version``, ``buffered`` and ``running``
    (groups), ``leases`` (instances in use), ``waiting`` (episodes without one), ``episodes``, ``note`` (any text).
    """

    def __init__(self, name: str, total_steps: int, console: Console | None = None) -> None:
        self._name = name
        self._total = total_steps
        self._console = console or Console()
        self._status: dict[str, Any] = {}
        self._started = time.monotonic()
        self._first_step: tuple[int, float] | None = None  # step and time from which the rate of steps is taken
        self._last_step: tuple[int, float] | None = None
        self._printed: tuple[Any, Any] = (None, None)
        self._live = (
            Live(get_renderable=self.render, console=self._console, refresh_per_second=REFRESH_PER_S)
            if self._console.is_terminal
            else None
        )

    def __enter__(self) -> ProgressDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, status: Mapping[str, Any]) -> None:
        """Take over what is known now. Cheap; call it as often as you like."""
        self._status |= {key: value for key, value in status.items() if value is not None}
        step = self._status.get("step")
        if step is not None and (self._last_step is None or step != self._last_step[0]):
            self._last_step = (step, time.monotonic())
            self._first_step = self._first_step or self._last_step
        if self._live is None:
            self._print_changes()

    def _print_changes(self) -> None:
        """Without a terminal: a line for each new phase and each new step."""
        now = (self._status.get("phase"), self._status.get("step"))
        if now == self._printed:
            return
        self._printed = now
        words = [f"[{_duration(self._elapsed())}]", self._status.get("phase", ""), f"step {self._steps()}"]
        words += [f"{label} {value}" for label, value in self._figures() if value != UNKNOWN]
        self._console.print("  ".join(word for word in words if word), highlight=False, markup=False, soft_wrap=True)

    def render(self) -> Group:
        """The panel: a heading, a bar, and the figures in two rows that fit 80 columns."""
        heading = Table.grid(expand=True)
        heading.add_column()
        heading.add_column(justify="right")
        heading.add_row(
            Text.assemble((self._name, "bold"), "  ", (str(self._status.get("phase", "")), "cyan")),
            Text(f"{_duration(self._elapsed())} elapsed, {self._remaining()}", style="dim"),
        )
        done = self._status.get("step") or 0
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(ratio=1)
        bar.add_column(justify="right")
        bar.add_row(ProgressBar(total=max(1, self._total), completed=done), f"step {self._steps()}")
        parts: list[Any] = [heading, bar, self._figure_table()]
        if note := self._status.get("note"):
            parts.append(Text(str(note), style="yellow", overflow="ellipsis", no_wrap=True))
        return Group(*parts)

    def _figure_table(self) -> Table:
        figures = self._figures()
        table = Table.grid(expand=True, padding=(0, 1))
        half = len(figures) // 2
        for _ in range(half):
            table.add_column(ratio=1, no_wrap=True)
        for row in (figures[:half], figures[half:]):
            table.add_row(*(Text.assemble((f"{label} ", "dim"), (value, "bold")) for label, value in row))
        return table

    def _figures(self) -> list[tuple[str, str]]:
        get = self._status.get
        return [
            ("reward", _number(get("reward"), 3)),
            ("pass@1", _number(get("pass_at_1"), 3)),
            ("tokens/s", _number(get("tokens_per_s"), 0)),
            ("staleness", _number(get("staleness"), 2)),
            ("version", _number(get("version"), 0)),
            ("buffer", _number(get("buffered"), 0)),
            ("in flight", _number(get("running"), 0)),
            ("leases", _number(get("leases"), 0)),
            ("waiting", _number(get("waiting"), 0)),
            ("episodes", _number(get("episodes"), 0)),
        ]

    def _steps(self) -> str:
        return f"{self._status.get('step') or 0}/{self._total}"

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _remaining(self) -> str:
        """Time to the last step, by the mean rate since the first step that was seen."""
        if self._first_step is None or self._last_step is None:
            return "no step yet"
        (first, since), (last, until) = self._first_step, self._last_step
        if last >= self._total:
            return "steps done"
        if last == first:
            return "ETA " + UNKNOWN
        per_step = (until - since) / (last - first)
        left = (self._total - last) * per_step - (time.monotonic() - until)
        return f"ETA {_duration(max(0.0, left))}"


def _number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
