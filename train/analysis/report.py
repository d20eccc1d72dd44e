"""``report.html``: the analysis and its episodes on one page that needs no network.

The page is made from ``page.html``, ``page.css`` and ``page.js`` beside this file. Episodes are in it as chunks of gzip
in base64 that the browser unpacks when they are looked at, so it opens at once however many there are.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import jinja2
import numpy as np
import polars as pl

from train.analysis.dumps import DumpFile, RunFiles, read_episode, where_in
from train.analysis.episode import Episode
from train.analysis.error_patterns import PATTERNS
from train.analysis.markdown import change_text, count_text, episodes_text, kind, mean_text, rate_text, tasks_of
from train.analysis.scan import workers
from train.analysis.summary import Analysis, EnvSummary, StepSummary

MAX_EPISODES = 5_000
CHUNK_CHARS = 1_000_000  # of text, about: what one look at an episode unpacks
MAX_MESSAGE_CHARS = 20_000
MAX_PAGE_CHARS = 400_000_000  # of text; on the page they take about a seventh
MAX_POINTS = 400  # of a curve: more than that many pixels tell apart
MAX_TOKENS = 4_000_000  # whose masks, versions and logprobs are on the page
CHARS_PER_TOKEN = 4  # about
_MARKS = {"IMPROVED": "▲", "REGRESSED": "▼", "FLAT": "▬", "SATURATED": "●", "FAILING": "✕", "TOO FEW": "?"}
_HERE = Path(__file__).parent


def write_report(
    path: Path, analysis: Analysis, run: RunFiles, table: pl.DataFrame, max_episodes: int = MAX_EPISODES
) -> int:
    """Write the page, whole or not at all. Returns the number of episodes on it.

    Raises:
        DumpError: an episode cannot be read again.
    """
    selected = select(table, analysis, max_episodes)
    partial_path = path.with_name(f".{path.name}.partial")
    chunks_path = path.with_name(f".{path.name}.chunks")
    try:
        with chunks_path.open("w", encoding="utf-8") as chunks:
            places, vocabulary = _write_chunks(chunks, run, selected)
        selected = selected.with_columns(
            chunk=pl.Series([chunk for chunk, _ in places], dtype=pl.Int32),
            place=pl.Series([place for _, place in places], dtype=pl.Int32),
        )
        with partial_path.open("w", encoding="utf-8") as page, chunks_path.open(encoding="utf-8") as chunks:
            page.write(_head(analysis, selected, table.height, vocabulary))
            while text := chunks.read(2**20):
                page.write(text)
            page.write("</body>\n</html>\n")
        os.replace(partial_path, path)
    finally:
        chunks_path.unlink(missing_ok=True)
        partial_path.unlink(missing_ok=True)
    return selected.height


def select(table: pl.DataFrame, analysis: Analysis, limit: int) -> pl.DataFrame:
    """Which episodes the page holds, at most ``limit`` and ``MAX_PAGE_CHARS``: those of the examples, then those of the
    two steps, then other evaluations, then training batches; within these whole tasks by the hash of their names.

    In order of environment, task and step.
    """
    examples = pl.DataFrame(
        {"file": [e.source[0] for e in analysis.examples], "position": [e.source[1] for e in analysis.examples]},
        schema={"file": pl.Int32, "position": pl.Int64},
    ).with_columns(example=pl.lit(True))
    two_steps = pl.col("step").is_in([analysis.baseline, analysis.last]) & (pl.col("label") == analysis.label)
    rank = (
        pl.when(pl.col("example").is_not_null())
        .then(0)
        .when(two_steps)
        .then(1)
        .when(pl.col("label") != "train")
        .then(2)
        .otherwise(3)
    )
    return (
        table.join(examples.unique(), on=["file", "position"], how="left")
        .with_columns(rank=rank, shuffle=pl.concat_str("env", "task", separator="/").hash(seed=0))
        .sort("rank", "shuffle", "step", "file", "position")
        .head(limit)
        .filter(pl.col("chars").cum_sum() <= MAX_PAGE_CHARS)
        .sort("env", "task", "step", "label", "file", "position")
        .drop("example", "rank", "shuffle")
    )


# -- chunks


@dataclass(frozen=True)
class _Chunk:
    """Some episodes, and their tokens, as base64 of gzip. ``ids``: the token ids in it."""

    episodes: str
    tokens: str | None
    ids: set[int]


def _write_chunks(page: TextIO, run: RunFiles, selected: pl.DataFrame) -> tuple[list[tuple[int, int]], bool]:
    """Write the episodes. Returns chunk and place of each, and whether the page has a vocabulary."""
    batches = _batches(selected)
    pack = partial(_pack, run.episodes)
    places: list[tuple[int, int]] = []
    ids: set[int] = set()
    with workers(run.nbytes) as map_batches:
        for number, chunk in enumerate(map_batches(pack, batches, range(len(batches)), _token_budgets(len(batches)))):
            page.write(_script(f"chunk-{number}", chunk.episodes))
            if chunk.tokens is not None:
                page.write(_script(f"tokens-{number}", chunk.tokens))
            places += [(number, place) for place in range(len(batches[number]))]
            ids |= chunk.ids
    pieces = _pieces(run.tokenizer, ids)
    if pieces:
        page.write(_script("vocabulary", _compressed(pieces)))
    return places, bool(pieces)


def _batches(selected: pl.DataFrame) -> list[list[tuple[int, int]]]:
    """The places of the episodes, in order, cut where ``CHUNK_CHARS`` are full."""
    batches: list[list[tuple[int, int]]] = []
    chars = CHUNK_CHARS
    for file, position, size in selected.select("file", "position", "chars").rows():
        if chars + size > CHUNK_CHARS:
            batches.append([])
            chars = 0
        batches[-1].append((file, position))
        chars += size
    return batches


def _token_budgets(chunks: int) -> list[int]:
    """Tokens that each chunk may hold, known beforehand, so that chunks can be packed side by side. Every n-th chunk
    has room for all of its tokens: shared among many chunks, the room of each would be too small for an episode."""
    every = max(1, -(-chunks * CHUNK_CHARS // (CHARS_PER_TOKEN * MAX_TOKENS)))
    chosen = range(0, chunks, every)
    return [MAX_TOKENS // len(chosen) if number in chosen else 0 for number in range(chunks)]


def _script(name: str, text: str) -> str:
    return f'<script type="text/plain" id="{name}">{text}</script>\n'


def _compressed(value: Any) -> str:
    packed = gzip.compress(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace"), 6)
    return base64.b64encode(packed).decode()


def _pack(files: tuple[DumpFile, ...], sources: list[tuple[int, int]], number: int, max_tokens: int) -> _Chunk:
    prompts: dict[tuple[tuple[str, str], ...], int] = {}
    episodes: list[dict[str, Any]] = []
    tokens: list[dict[str, Any]] = []
    ids: set[int] = set()
    for source in sources:
        episode = read_episode(files, source)
        shown = _shown(files, episode, prompts.setdefault(episode.prompt, len(prompts)))
        size = len(episode.recorded_tokens.get("ids", ()))
        if 0 < size <= max_tokens:
            max_tokens -= size
            shown["k"] = [number, len(tokens)]
            tokens.append(_tokens(episode.recorded_tokens))
            ids.update(tokens[-1]["ids"])
        episodes.append(shown)
    told = [[[role, _cut(text)] for role, text in prompt] for prompt in prompts]
    packed = _compressed({"prompts": told, "episodes": episodes})
    return _Chunk(packed, _compressed(tokens) if tokens else None, ids)


def _shown(files: tuple[DumpFile, ...], episode: Episode, prompt: int) -> dict[str, Any]:
    """An episode for the page.

    ``p``: its prompt; ``t``: its turns as thinking, text, what was read, and whether that is an error; ``f``: its
    findings as pattern, turn and quote; ``w``: where it stands.
    """
    file, position = files[episode.source[0]], episode.source[1]
    findings = [
        [index, finding.turn, finding.quote]
        for index, pattern in enumerate(PATTERNS)
        for finding in pattern.find(episode)
    ]
    turns = [
        [
            _cut(turn.thinking.strip()),
            _cut(turn.visible),
            None if turn.observation is None else _cut(turn.observation),
            int(turn.error is not None),
        ]
        for turn in episode.turns
    ]
    return {"p": prompt, "t": turns, "f": findings, "w": f"{file.name}, {where_in(file, position)}"}


def _cut(text: str) -> str:
    if len(text) <= MAX_MESSAGE_CHARS:
        return text
    return f"{text[:MAX_MESSAGE_CHARS]}\n[the last {len(text) - MAX_MESSAGE_CHARS:,} characters are not on this page]"


def _tokens(recorded: dict[str, Any]) -> dict[str, Any]:
    """Token columns as JSON; the mask as lengths of runs, the first of zeros."""
    mask = np.asarray(recorded["mask"], dtype=np.int8)
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=1 - mask[-1])) if len(mask) else np.array([], dtype=int)
    return {
        "ids": [int(i) for i in recorded["ids"]],
        "mask": [int(length) for length in np.diff(edges, prepend=0)],
        "logprobs": [None if p is None or not np.isfinite(p) else round(float(p), 4) for p in recorded["logprobs"]],
        "spans": [list(span) for span in recorded["spans"]],
        "starts": [int(start) for start in recorded["starts"]],
    }


def _pieces(tokenizer: Path | None, ids: set[int]) -> dict[int, str]:
    """The text of each token id, where the run left its tokenizer. Bytes that are half a character stay unreadable."""
    if tokenizer is None or not ids:
        return {}
    from tokenizers import Tokenizer

    try:
        decoder = Tokenizer.from_file(str(tokenizer))
    except Exception:  # the library raises bare exceptions; ids are shown instead
        return {}
    return {i: decoder.decode([i], skip_special_tokens=False) for i in sorted(ids)}


# -- what stands before the chunks


def _head(analysis: Analysis, selected: pl.DataFrame, episodes: int, vocabulary: bool) -> str:
    js = (_HERE / "page.js").read_text(encoding="utf-8")
    # Only this very script may run: text that escaped its quotes anyway could do nothing.
    digest = base64.b64encode(hashlib.sha256(js.encode()).digest()).decode()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    patterns = _pattern_rows(analysis)
    found = {row["title"] for row in patterns}
    shown = f"{selected.height:,} of {episodes:,} episodes are on this page"
    if selected.height < episodes:
        shown += ": those of the examples first, then whole tasks of the two steps, then the others"
    return environment.get_template("page.html").render(
        a=analysis,
        kind=kind(analysis),
        two_steps=analysis.baseline != analysis.last,
        rows=[_status_row(row) for row in (*analysis.environments, analysis.overall)],
        patterns=patterns,
        clean=[pattern.title for pattern in PATTERNS if pattern.title not in found],
        shown=f"{shown}.",
        data=_data(analysis, selected, vocabulary),
        css=(_HERE / "page.css").read_text(encoding="utf-8"),
        js=js,
        script_hash=f"sha256-{digest}",
    )


def _status_row(row: EnvSummary) -> dict[str, Any]:
    verdict = row.verdict
    return {
        "env": row.env,
        "status": str(verdict.status) if verdict else None,
        "mark": _MARKS[verdict.status] if verdict else "",
        "why": verdict.why if verdict else None,
        "tasks": tasks_of(row),
        "episodes": episodes_text(row),
        "turns": mean_text(row, "turns"),
        "calls": mean_text(row, "calls"),
        "failed": _share_text(row, "failed_call_share"),
        "thinking": _share_text(row, "thinking_share"),
        "before": rate_text(row.before),
        "after": rate_text(row.after),
        "change": change_text(verdict),
    }


def _share_text(row: EnvSummary, name: str) -> str:
    def text(step: StepSummary | None) -> str:
        return f"{100 * getattr(step, name):.0f} %" if step else "–"

    return f"{text(row.before)} → {text(row.after)}"


def _pattern_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """The patterns that were found, with a row for each environment."""
    rows = []
    for index, pattern in enumerate(PATTERNS):
        counts = analysis.patterns[pattern.key]
        envs = sorted({count.env for count in counts if count.episodes})
        if not envs:
            continue
        at = {(count.env, count.step): count for count in counts}
        environments = [
            {
                "env": env,
                "before": count_text(at.get((env, analysis.baseline))),
                "after": count_text(at.get((env, analysis.last))),
                "examples": [e for e in analysis.examples if (e.pattern, e.env) == (pattern.key, env)],
            }
            for env in envs
        ]
        rows.append({"index": index, "title": pattern.title, "rule": pattern.rule, "counts": environments})
    return rows


def _thinned(points: list[list[float]]) -> list[list[float]]:
    """At most ``MAX_POINTS`` points: of a longer run, each is the mean of neighbouring steps."""
    if len(points) <= MAX_POINTS:
        return points
    means = [part.mean(axis=0) for part in np.array_split(np.asarray(points, dtype=float), MAX_POINTS)]
    return [[round(float(step)), *(round(float(value), 6) for value in values)] for step, *values in means]


def _data(analysis: Analysis, selected: pl.DataFrame, vocabulary: bool) -> str:
    """What the script reads at once: the analysis, and an index of the episodes by columns."""
    coded = {"envs": "env", "tasks": "task", "labels": "label", "stops": "stop_reason"}
    index: dict[str, list[Any]] = {}
    for names, column in coded.items():
        index[names] = selected[column].unique(maintain_order=True).to_list()
        number = {name: i for i, name in enumerate(index[names])}
        index["stop" if column == "stop_reason" else column] = [number[name] for name in selected[column]]
    for column in ("step", "reward", "turns", "calls", "file", "position", "chunk", "place"):
        index[column] = selected[column].to_list()
    index["failed"] = selected["failed_calls"].to_list()
    flags = sum(((pl.col(pattern.key) > 0).cast(pl.Int32) * (1 << i) for i, pattern in enumerate(PATTERNS)), pl.lit(0))
    index["flags"] = selected.select(flags.alias("flags"))["flags"].to_list()
    known = analysis.as_json()
    known["curves"] = {
        env: {name: _thinned(points) for name, points in series.items()} for env, series in known["curves"].items()
    }
    data = {
        "analysis": {k: known[k] for k in ("baseline", "last", "label", "environments", "overall", "tasks", "curves")},
        "patterns": [{"key": pattern.key, "title": pattern.title} for pattern in PATTERNS],
        "index": index,
        "vocabulary": vocabulary,
    }
    # "<" is the one character that could end the script's element early.
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
