"""The page: whole without a network, nothing of an episode can break out of it, and all of it can be read back."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.skyrl_dumps import call, episode, solved, think, write_dump
from tests.trajectories import make_groups
from train.analysis import report
from train.analysis.dumps import find_run
from train.analysis.report import select, write_report
from train.analysis.scan import scan
from train.analysis.summary import summarise
from train.trajectory_store import StoreSettings, TrajectoryStore
from train.trajectory_table import Origin

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> --> ]]> \u2028 </title> & \" ' {{ 7*7 }}"


@dataclass
class Page(HTMLParser):
    """What a browser's parser makes of the file."""

    text: str = ""
    scripts: dict[str, str] = field(default_factory=dict)
    code: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    _inside: str | None = None
    _id: str | None = None

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag in ("script", "style"):
            self._inside, self._id = tag, attributes.get("id")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is None:
            self.text += data
        elif self._inside == "script" and self._id is not None:
            self.scripts[self._id] = self.scripts.get(self._id, "") + data
        elif self._inside == "script":
            self.code.append(data)

    def unpacked(self, name: str) -> Any:
        return json.loads(gzip.decompress(base64.b64decode(self.scripts[name])))

    def episodes(self) -> list[dict[str, Any]]:
        """The episodes in the order of the index, each with its prompt."""
        index = json.loads(self.scripts["data"])["index"]
        found = []
        for chunk, place in zip(index["chunk"], index["place"], strict=True):
            unpacked = self.unpacked(f"chunk-{chunk}")
            one = unpacked["episodes"][place]
            found.append(one | {"prompt": unpacked["prompts"][one["p"]]})
        return found


def page_of(run: Path, **options: Any) -> Page:
    files = find_run(str(run), run)
    table, examples = scan(files.episodes)
    path = run / "report.html"
    write_report(path, summarise(files, table, examples), files, table, **options)
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    return page


def hostile_run(run: Path) -> None:
    turns = [(think(HOSTILE, call("search", q=HOSTILE)), f"Error: no {HOSTILE} 5"), (f"{HOSTILE}<done>", None)]
    for step, reward in [(0, 0.0), (7, 1.0)]:
        lines = [
            episode(turns, reward, task=f"{HOSTILE}{i}", env=f"hub{HOSTILE[:9]}", prompt=HOSTILE) for i in range(3)
        ]
        for line in lines:
            line["data_source"] = "hub"  # the file's name
        write_dump(run, step, [line | {"env_extras": line["env_extras"]} for line in lines])
    rows = [{"step": step, "reward/hub/pass_at_1": 0.5, "reward/hub/variance_per_prompt": 0.1} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_nothing_in_an_episode_becomes_markup_or_code(tmp_path):
    hostile_run(tmp_path)
    page = page_of(tmp_path)
    assert [tag for tag, _ in page.tags if tag in ("img", "link", "iframe", "object", "base")] == []
    assert len(page.code) == 1  # ours
    assert "alert(1)" not in page.code[0]
    assert "49" not in re.findall(r"' (\S+)", page.text)  # {{ 7*7 }} is no template
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert HOSTILE.split("\u2028")[0][:40] in page.text  # as text, in an example
    first = page.episodes()[0]
    assert first["prompt"][-1] == ["user", HOSTILE]
    assert first["t"][0][0] == HOSTILE
    assert (
        HOSTILE[:30]
        in json.loads(first["t"][0][1].removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"]["q"]
    )
    assert first["t"][1][1] == f"{HOSTILE}<done>"


def test_the_page_needs_no_network_and_runs_one_script_only(tmp_path):
    hostile_run(tmp_path)
    page = page_of(tmp_path)
    policies = [
        a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]
    digest = base64.b64encode(hashlib.sha256(page.code[0].encode()).digest()).decode()
    assert policies == [f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"]
    loaded = [a for tag, a in page.tags if a.get("src") or (a.get("href") and not a["href"].startswith("#"))]
    assert loaded == []
    assert not re.search(r"\b(?:fetch|XMLHttpRequest|import|innerHTML|eval|document\.write)\b\s*\(?", page.code[0])


def test_every_episode_reads_back_with_its_turns_results_and_findings(tmp_path):
    write_dump(tmp_path, 0, [solved(f"t{i:02}") for i in range(30)])
    failing = episode(
        [(think("Which?", call("get", number=483)), "Error: no issue 483"), ("<done>", None)], 0.0, task="u"
    )
    write_dump(tmp_path, 0, [failing])
    page = page_of(tmp_path)
    data = json.loads(page.scripts["data"])
    index, episodes = data["index"], page.episodes()
    assert len(episodes) == 31
    tasks = [index["tasks"][task] for task in index["task"]]
    assert tasks == sorted(tasks)
    last = episodes[tasks.index("u")]
    assert last["t"] == [["Which?", call("get", number=483), "Error: no issue 483", 1], ["", "<done>", None, 0]]
    named = {data["patterns"][pattern]["key"]: turn for pattern, turn, _ in last["f"]}
    assert named == {"not_found": 0, "invented_id": 0, "false_completion": 1}
    flags = index["flags"][tasks.index("u")]
    assert {p["key"] for i, p in enumerate(data["patterns"]) if flags >> i & 1} == set(named)
    assert last["w"].startswith("evals/global_step_0/github.jsonl, byte ")


def test_tokens_come_with_mask_versions_and_logprobs(tmp_path):
    store = TrajectoryStore(StoreSettings(str(tmp_path / "trajectories"), jsonl=False))
    store.put(make_groups(4), Origin("train", 1, 3))
    store.close()
    page = page_of(tmp_path)
    index = json.loads(page.scripts["data"])["index"]
    originals = {
        (t.task_key, str(t.reward)): t for group in make_groups(4) for t in group.trajectories if t.reward is not None
    }
    checked = 0
    for row, shown in enumerate(page.episodes()):
        original = originals.get((index["tasks"][index["task"][row]], str(index["reward"][row])))
        if original is None:
            continue
        chunk, place = shown["k"]
        tokens = page.unpacked(f"tokens-{chunk}")[place]
        mask = [bit for i, run in enumerate(tokens["mask"]) for bit in [i % 2] * run]
        assert tokens["ids"] == original.ids.tolist()
        assert mask == original.mask.tolist()
        assert tokens["spans"] == [[s.version, s.start, s.end] for s in original.spans]
        assert tokens["logprobs"] == pytest.approx(original.logprobs.tolist(), abs=1e-4)
        checked += 1
    assert checked == len(originals) == 6


@pytest.mark.parametrize("chunks", [0, 1, 15, 16, 17, 31, 33, 100, 400])
def test_however_large_the_page_the_chunks_that_hold_tokens_have_room_for_all_of_theirs(chunks):
    budgets = report._token_budgets(chunks)
    assert len(budgets) == chunks
    assert sum(budgets) <= report.MAX_TOKENS
    assert {b for b in budgets if b < report.CHUNK_CHARS / report.CHARS_PER_TOKEN} <= {0}
    if chunks:
        places = [number for number, budget in enumerate(budgets) if budget]
        assert max(b - a for a, b in zip(places, [*places[1:], chunks], strict=True)) <= -(-chunks // 16)


def test_a_page_of_many_chunks_still_shows_tokens(tmp_path, monkeypatch):
    store = TrajectoryStore(StoreSettings(str(tmp_path / "trajectories"), jsonl=False))
    store.put(make_groups(20), Origin("train", 1, 3))
    store.close()
    monkeypatch.setattr(report, "CHUNK_CHARS", 60 * report.CHARS_PER_TOKEN)  # 60 tokens each: a chunk for each episode
    monkeypatch.setattr(report, "MAX_TOKENS", 2 * 60)
    assert ["k" in one for one in page_of(tmp_path).episodes()] == ([True] + [False] * 19) * 2


@pytest.mark.parametrize("mask", [[], [0], [1], [0, 0, 1, 1, 0], [1, 0, 1], [0, 1, 1]])
def test_a_mask_survives_its_run_lengths(mask):
    runs = report._tokens({"ids": mask, "mask": mask, "logprobs": [], "spans": [], "starts": [0]})["mask"]
    assert [bit for i, length in enumerate(runs) for bit in [i % 2] * length] == mask


def test_a_page_that_cannot_hold_all_keeps_the_examples_and_whole_tasks_of_both_steps(tmp_path):
    for step in (0, 5, 9):
        write_dump(tmp_path, step, [solved(f"t{i}") for i in range(40) for _ in range(2)])
    odd = episode([("never done", None)], 0.0, task="t39", max_turns=1)
    write_dump(tmp_path, 9, [odd])
    files = find_run(str(tmp_path), tmp_path)
    table, examples = scan(files.episodes)
    analysis = summarise(files, table, examples)
    kept = select(table, analysis, 41)
    assert kept.height == 41
    assert set(kept["step"]) == {0, 9}
    assert kept["no_action"].sum() == 1
    per_task = kept.filter(kept["no_action"] == 0).group_by("task").len()["len"].to_list()
    assert sorted(per_task, reverse=True)[:9] == [4] * 9
    page = page_of(tmp_path, max_episodes=41)
    assert "41 of 241 episodes are on this page" in page.text
    assert len(page.episodes()) == 41


def test_a_long_run_has_curves_of_few_points_with_the_same_mean(tmp_path):
    write_dump(tmp_path, 0, [solved("a")])
    rows = [{"step": step, "reward/github/pass_at_1": (step % 10) / 10} for step in range(1, 20_001)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves = json.loads(page_of(tmp_path).scripts["data"])["analysis"]["curves"]["github"]
    assert len(curves["reward"]) == 400
    assert sum(value for _, value in curves["reward"]) / 400 == pytest.approx(0.45)
    steps = [step for step, _ in curves["reward"]]
    assert steps == sorted(set(steps))


def test_long_messages_are_cut_and_say_so(tmp_path):
    write_dump(tmp_path, 0, [episode([(call("read"), "Tool result:\n" + "y" * 50_000), ("<done>", None)])])
    shown = page_of(tmp_path).episodes()[0]["t"][0][2]
    assert shown.startswith("y" * 20_000 + "\n[the last 30,000 characters")


def test_a_page_of_nothing_and_one_without_room_still_stand(tmp_path, monkeypatch):
    write_dump(tmp_path, 0, [solved("a"), solved("b")])
    assert page_of(tmp_path, max_episodes=0).episodes() == []
    monkeypatch.setattr(report, "CHUNK_CHARS", 1)
    assert len(page_of(tmp_path).episodes()) == 2
    monkeypatch.setattr(report, "MAX_PAGE_CHARS", 300)  # an episode has some 180
    assert len(page_of(tmp_path).episodes()) == 1


def test_the_tables_can_be_read_without_scripts(tmp_path):
    hostile_run(tmp_path)
    text = " ".join(page_of(tmp_path).text.split())
    for words in (
        "Status",
        "TOO FEW",
        "3 unique tasks",
        "+100.0 [",
        "From metrics.jsonl",
        "False completion",
        "Not found:",
    ):
        assert words in text, words


def test_nothing_is_left_where_writing_fails(tmp_path, monkeypatch):
    write_dump(tmp_path, 0, [solved("a")])
    files = find_run(str(tmp_path), tmp_path)
    table, examples = scan(files.episodes)
    analysis = summarise(files, table, examples)
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(report, "_head", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(out / "report.html", analysis, files, table)
    assert list(out.iterdir()) == []
