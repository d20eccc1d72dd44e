"""An analysis as a section of Markdown for an experiment log, and its figures as short texts."""

from __future__ import annotations

from train.analysis.error_patterns import PATTERNS
from train.analysis.scan import Example
from train.analysis.status import Verdict
from train.analysis.summary import Analysis, EnvSummary, PatternCount, StepSummary
from train.statistics import Interval

FEW_EPISODES = 100


def markdown(analysis: Analysis) -> str:
    """A section for an experiment log."""
    two = f"{analysis.baseline} → " if analysis.baseline != analysis.last else ""
    lines = [
        f"## {_cell(analysis.run)}: step {two}{analysis.last}",
        "",
        f"{analysis.episodes:,} episodes from {analysis.files:,} files; {kind(analysis)}. Success is pass@1 over "
        f"unique tasks; brackets are {analysis.confidence:.0%} intervals; a change of "
        f"{100 * analysis.min_change:.0f} points matters.",
        "",
        *[f"- **{status}**: {_cell(text)}" for status, text in findings(analysis)],
        "",
        "| environment | tasks | episodes | turns | tool calls | before | after | change | status |",
        "|---|---|---|---|---|---|---|---|---|",
        *[_status_row(row) for row in (*analysis.environments, analysis.overall)],
        "",
        *_pass_k_table(analysis),
        *_signal_table(analysis),
        *_pattern_table(analysis),
        *[f"> {_cell(warning)}" for warning in analysis.warnings],
    ]
    return "\n".join(lines).rstrip() + "\n"


def kind(analysis: Analysis) -> str:
    """What the statuses stand on, in words."""
    if analysis.label == "train":
        return "training batches, for there is no evaluation"
    return "evaluations under the run's sampling" if analysis.label == "sampled" else f"evaluations: {analysis.label}"


def findings(analysis: Analysis) -> list[tuple[str, str]]:
    """Each status and its environments in words, the surprising ones first."""
    by_status: dict[str, list[str]] = {}
    for row in analysis.environments:
        if row.verdict is not None:
            by_status.setdefault(row.verdict.status, []).append(f"{row.env} ({row.verdict.why})")
    if not by_status:
        return [("no status", "statuses need evaluations at two steps")]
    order = ("REGRESSED", "FAILING", "TOO FEW", "FLAT", "SATURATED", "IMPROVED")
    return [(status, "; ".join(by_status[status])) for status in order if status in by_status]


def _status_row(row: EnvSummary) -> str:
    before, after, verdict = row.before, row.after, row.verdict
    cells = [
        _cell(row.env),
        str(tasks_of(row)),
        episodes_text(row),
        mean_text(row, "turns"),
        mean_text(row, "calls"),
        rate_text(before),
        rate_text(after),
        change_text(verdict),
        str(verdict.status) if verdict else "–",
    ]
    return f"| {' | '.join(cells)} |"


def tasks_of(row: EnvSummary) -> int:
    """Unique tasks that the status stands on, or that were graded where there is none."""
    if row.verdict is not None:
        return row.verdict.tasks
    return max((step.success.tasks for step in (row.before, row.after) if step and step.success), default=0)


def episodes_text(row: EnvSummary) -> str:
    return " → ".join(str(step.episodes) if step else "0" for step in (row.before, row.after))


def mean_text(row: EnvSummary, name: str) -> str:
    """``name`` is ``turns`` or ``calls``."""
    return " → ".join(f"{getattr(step, name).value:.1f}" if step else "–" for step in (row.before, row.after))


def rate_text(step: StepSummary | None, name: str = "rate") -> str:
    """``name`` is ``rate``, ``pass_at_k`` or ``pass_hat_k``."""
    if step is None or step.success is None:
        return "–"
    success = step.success
    interval = success.interval if name == "rate" else getattr(success, f"{name}_interval")
    return f"{100 * getattr(success, name):.1f} % {_brackets(interval)}"


def _brackets(interval: Interval) -> str:
    return f"[{100 * interval.low:.0f}, {100 * interval.high:.0f}]"


def change_text(verdict: Verdict | None) -> str:
    if verdict is None:
        return "–"
    low, high = 100 * verdict.interval.low, 100 * verdict.interval.high
    return f"{100 * verdict.change:+.1f} [{low:+.0f}, {high:+.0f}]"


def count_text(count: PatternCount | None) -> str:
    """Episodes, and findings in brackets; the share's interval where so few episodes leave it wide."""
    if count is None:
        return "–"
    interval = f", {_brackets(count.interval)} %" if count.episodes and count.of < FEW_EPISODES else ""
    return f"{count.episodes} of {count.of} ({count.findings}){interval}"


def _pass_k_table(analysis: Analysis) -> list[str]:
    rows = [row for row in (*analysis.environments, analysis.overall) if _k(row) > 1]
    if not rows:
        return []
    lines = ["| environment | k | pass@k before | after | pass^k before | after |", "|---|---|---|---|---|---|"]
    for row in rows:
        names = ("pass_at_k", "pass_hat_k")
        values = [rate_text(step, name) for name in names for step in (row.before, row.after)]
        lines.append(f"| {_cell(row.env)} | {_k(row)} | {' | '.join(values)} |")
    return [*lines, ""]


def _k(row: EnvSummary) -> int:
    return max((step.success.k for step in (row.before, row.after) if step and step.success), default=0)


def _signal_table(analysis: Analysis) -> list[str]:
    if not analysis.signal:
        return []
    source = analysis.signal[0].source
    return [
        f"Signal, from {source} (below 0.25 of the tasks with signal, an environment is too hard or too easy):",
        "",
        "| environment | steps | mean variance | steps with signal | tasks with signal |",
        "|---|---|---|---|---|",
        *[
            f"| {_cell(s.env)} | {s.steps} | {s.variance:.3f} | {s.steps_with_signal:.0%} | {s.signal_ratio:.0%} |"
            for s in analysis.signal
        ],
        "",
    ]


def _pattern_table(analysis: Analysis) -> list[str]:
    lines = []
    for pattern in PATTERNS:
        for env in sorted({count.env for count in analysis.patterns[pattern.key]}):
            counts = {c.step: c for c in analysis.patterns[pattern.key] if c.env == env}
            if any(count.episodes for count in counts.values()):
                before, after = (counts.get(step) for step in (analysis.baseline, analysis.last))
                example = next((e for e in analysis.examples if (e.pattern, e.env) == (pattern.key, env)), None)
                lines.append(
                    f"| {pattern.title} | {_cell(env)} | {count_text(before)} | {count_text(after)} "
                    f"| {_example_text(example)} |"
                )
    if not lines:
        return ["No error pattern was found.", ""]
    head = ["| error pattern | environment | before | after | example |", "|---|---|---|---|---|"]
    return ["Episodes with an error pattern, and its findings in brackets:", "", *head, *lines, ""]


def _example_text(example: Example | None) -> str:
    if example is None:
        return "–"
    return f"{_cell(example.task)}, turn {example.turn}: {_cell(example.quote[:100])}"


def _cell(text: str) -> str:
    """Text of others in a table's cell: no pipes, line ends, HTML or formatting."""
    escaped = "".join(f"\\{c}" if c in "\\|*_`[]<>#~" else c for c in " ".join(text.split()))
    return escaped.replace("&", "&amp;")
