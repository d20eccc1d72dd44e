"""Error patterns: planted ones are counted exactly; on labelled episodes each rule is as precise as the docs say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.skyrl_dumps import call, episode, result, solved, think, write_dump
from train.analysis.dumps import DumpFile, Part, find_run, read_part
from train.analysis.episode import error_text
from train.analysis.error_patterns import PATTERNS, error_class
from train.analysis.scan import scan

ROOT = Path(__file__).resolve().parents[2]
LABELLED = ROOT / "tests" / "data" / "error_patterns.jsonl"
DOCS = ROOT / "docs" / "analysis.md"
KEYS = [pattern.key for pattern in PATTERNS]
THOUGHT = "I look for the issue that the user means, and then I close it with the tool for that. "


def planted() -> list[tuple[dict, dict[str, int]]]:
    """Episodes, and how many findings each pattern must have in them. Whatever is not named must have none."""
    found = result([{"number": 482}])
    search, close = call("search_issues", query="login"), call("close_issue", number=482)
    end = ("Closed.<done>", None)
    answer = "Closed it." * 19 + "<done>"
    return [
        # repetition: the second and third call repeat the one before
        (
            episode([(search, found), (search, found), (search, found), (close, result("ok")), end]),
            {"repeated_call": 2},
        ),
        # not right after each other, but the third time
        (
            episode([(search, found), (close, found), (search, found), (call("x"), found), (search, found), end]),
            {"repeated_call": 1},
        ),
        (episode([(search, found), end], reward=0.0), {"false_completion": 1}),
        (episode([("[done] all of it", None)], reward=0.0), {"false_completion": 1}),
        (episode([(search, found), (close, None)], reward=0.0, stop="length"), {"context_overflow": 1}),
        (episode([(search, found), ("I will now", None)], reward=0.0, stop="length"), {"context_overflow": 1}),
        # no answer: empty, nothing at all, a gateway's error
        (
            episode(
                [(search, "Tool result:\n"), (close, None), (call("get", number=482), found), end], prompt="Close 482."
            ),
            {"no_env_response": 2},
        ),
        (
            episode([(search, "Action executed."), (search + " ", "Error: 502 Bad Gateway"), end]),
            {"no_env_response": 2, "repeated_call": 1},
        ),
        (episode([(close, None)], reward=0.0, stop="timeout", prompt="Close 482."), {"no_env_response": 1}),
        (episode([(think("x" * 810, answer), None)]), {"excessive_thinking": 1}),
        # 50 turns of 50
        (
            episode([(call("open", n=i), found) for i in range(49)] + [(call("open", n=49), None)], 0.0, max_turns=50),
            {"max_turns": 1},
        ),
        (episode([(search, found), (close, None)], reward=0.0, stop="max_turns"), {"max_turns": 1}),
        # 483 and 7 were never seen, 482 was
        (
            episode(
                [
                    (search, found),
                    (call("close_issue", number=483), result("ok")),
                    (call("get", issue_ids=[482, 7]), found),
                    end,
                ]
            ),
            {"invented_id": 2},
        ),
        (
            episode(
                [
                    (call("close_issue", issue="482"), "Error: unknown argument issue, expected number"),
                    (search, found),
                    end,
                ]
            ),
            {"tool_argument_error": 1},
        ),
        (episode([(search, 'Tool result:\n{"error": "403: Forbidden"}'), end]), {"authorisation": 1}),
        (episode([(search, "Error: no issue 482"), end]), {"not_found": 1}),
        (
            episode([(think(THOUGHT, search + "x" * 300), found), (think(THOUGHT, close + "x" * 300), found), end]),
            {"repeated_thought": 1},
        ),
        (
            episode([("I think it is closed.", "No tool call found. Use <tool_call>...</tool_call> or <done>"), end]),
            {"no_action": 1},
        ),
        (solved("task-0"), {}),
    ]


@pytest.mark.parametrize("number", range(len(planted())))
def test_a_planted_pattern_is_found_as_often_as_it_was_planted_and_no_other_is(tmp_path, number):
    line, expected = planted()[number]
    write_dump(tmp_path, 0, [line])
    table, _ = scan(find_run(str(tmp_path), tmp_path).episodes)
    assert {key: table[key][0] for key in KEYS if table[key][0]} == expected


def test_counts_over_a_whole_dump_are_the_sums(tmp_path):
    cases = planted()
    write_dump(tmp_path, 40, [line | {"data_source": env} for env in ("github", "booking") for line, _ in cases])
    table, examples = scan(find_run(str(tmp_path), tmp_path).episodes)
    assert table.height == 2 * len(cases)
    for key in KEYS:
        assert table[key].sum() == 2 * sum(expected.get(key, 0) for _, expected in cases), key
        assert (table[key] > 0).sum() == 2 * sum(key in expected for _, expected in cases), key
    assert {example.pattern for example in examples} == {key for _, expected in cases for key in expected}
    assert all(example.quote and len(example.quote) <= 160 and example.turn >= 1 for example in examples)


def test_the_share_of_thinking_is_what_was_planted(tmp_path):
    line = episode([(think("t" * 8100 + "\n", "y" * 1900 + call("get")), result("ok")), ("z<done>", None)])
    write_dump(tmp_path, 0, [line])
    table, _ = scan(find_run(str(tmp_path), tmp_path).episodes)
    assert table["thinking_chars"][0] / table["policy_chars"][0] == pytest.approx(0.81, abs=0.01)


def test_a_done_signal_inside_thinking_or_arguments_is_none():
    turns = [(think("then I say <done>", call("note", text="<done>")), result("ok"))]
    line = episode([*turns, ("Still at work.", None)], reward=0.0, max_turns=2)
    assert findings(line) == {"max_turns": 1, "no_action": 1}


def test_an_episode_that_the_environment_ended_did_not_use_up_its_turns():
    line = episode([(call("submit", answer=1), None)], max_turns=50)
    assert findings(line) == {}
    assert findings(line | {"env_extras": {"max_turns": 1}}) == {"max_turns": 1}


def test_an_identifier_from_the_prompt_or_a_result_is_not_invented():
    turns = [
        (call("get", issue_id="T-15"), result({"parent": "T-16", "url": "/i/T-1799"})),
        (call("get", issue_id="T-16"), result("ok")),
        (call("create_issue", issue_id="T-99"), result("ok")),  # whoever makes something may name it
        (call("get", issue_id="T-17", page_number=3, flag=True), result("ok")),  # T-1799 is another one
        (call("close", issue_id="T-17"), result("ok")),  # the same invention
        ("<done>", None),
    ]
    assert findings(episode(turns, prompt="Look at T-15.")) == {"invented_id": 1}


def test_what_was_not_graded_is_no_false_completion():
    assert findings(episode([("It is closed.<done>", None)], reward=None)) == {}


def test_a_result_that_speaks_of_errors_is_none():
    for harmless in ('{"error": null, "rows": []}', '[{"error": "x"}]', '{"title": "Error: 404 not found"}', "", None):
        assert error_text(harmless) is None
    for error in ("Error: x", "ERROR: x", "error: x", '{"error": "x"}', '{"error": {"code": 5}}', '{"isError": true}'):
        assert error_text(error) is not None


@pytest.mark.parametrize(
    "error, expected",
    [
        ("Error: arguments['day']: '03.05.' does not match '^[0-9-]+$'", "tool_argument_error"),
        ("Error: 'id' is a required property", "tool_argument_error"),
        ("Error: status must be one of open, closed", "tool_argument_error"),
        ("Error: there is no tool 'serch'; did you mean search?", "tool_argument_error"),
        ("Error: HTTP 401", "authorisation"),
        ("Error: booking B-1 belongs to ivo: only its owner may change it", "authorisation"),
        ("Error: there is no page 'x'; search gives page ids", "not_found"),
        ("Error: no user ivo1", "not_found"),
        ("Error: ticket 401 does not exist", "not_found"),
        ("Error: search did not answer within 30 s", "no_env_response"),
        ("Error: Linden is taken from 09:00 to 10:00", None),
        ("Error: Linden has 4 seats, all taken", None),
    ],
)
def test_an_error_belongs_to_one_class_or_to_none(error, expected):
    assert error_class(error) == expected


def findings(line: dict) -> dict[str, int]:
    from train.analysis.dumps import episode_of_line

    file = DumpFile(Path("x.jsonl"), "x.jsonl", 0, "sampled", stored=False)
    found = episode_of_line(file, json.dumps(line).encode() + b"\n", (0, 0))
    return {pattern.key: len(n) for pattern in PATTERNS if (n := pattern.find(found))}


# -- precision on the labelled sample


def measured() -> dict[str, tuple[int, int, int]]:
    """For each pattern: episodes found rightly, found wrongly, and missed."""
    labels = [set(json.loads(line)["labels"]) for line in LABELLED.open(encoding="utf-8")]
    file = DumpFile(LABELLED, LABELLED.name, 0, "sampled", stored=False)
    episodes = list(read_part((file,), Part(0, 0, LABELLED.stat().st_size)))
    counts = {}
    for pattern in PATTERNS:
        pairs = [(bool(pattern.find(e)), pattern.key in label) for e, label in zip(episodes, labels, strict=True)]
        counts[pattern.key] = tuple(pairs.count(kind) for kind in ((True, True), (True, False), (False, True)))
    return counts


def test_every_rule_is_measured_and_precise_enough_to_be_read():
    for key, (right, wrong, missed) in measured().items():
        assert right >= 5, key
        assert right / (right + wrong) >= 0.75, key
        assert right / (right + missed) >= 0.75, key


def test_the_docs_have_the_precision_that_is_measured():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) of (\d+) \| (\d+) of (\d+) \|$", DOCS.read_text("utf-8"), re.MULTILINE)
    documented = {key: tuple(map(int, figures)) for key, *figures in rows}
    assert documented == {k: (tp, tp + fp, tp, tp + fn) for k, (tp, fp, fn) in measured().items()}


def test_labels_are_patterns_of_the_table():
    used = {label for line in LABELLED.open(encoding="utf-8") for label in json.loads(line)["labels"]}
    assert used == set(KEYS)
