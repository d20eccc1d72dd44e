"""What an evaluation comes to: rates against plain counting, and dumps that give them back."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from concurrent.futures import Future
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.trajectory import Graded, InfraFailed, Ungraded
from tests.trajectories import make_groups
from train.analysis.dumps import find_run, parts_of, read_part
from train.config import load_config
from train.evaluate import Attempt, aggregate, dump_eval, eval_folder, evaluate_groups
from train.evaluator import Evaluator, attempts_of_run

ATTEMPTS = st.lists(
    st.builds(
        Attempt,
        st.sampled_from(["tracker", "booking/eu"]),
        st.sampled_from("abcde"),
        st.sampled_from([None, 0.0, 0.5, 1.0]),
    ),
    max_size=24,
)


class Tokenizer:
    def decode(self, ids):
        return "".join(f"<{i}>" for i in ids)


def counted(attempts, env: str, k: int) -> tuple[list[float], list[float]]:
    """By every choice of k graded attempts at a task: share with a success, share with successes alone."""
    rewards = defaultdict(list)
    for attempt in attempts:
        if attempt.reward is not None and env in ("all", attempt.env.replace("/", "_")):
            rewards[attempt.env, attempt.task].append(attempt.reward > 0)
    draws = [list(combinations(task, k)) for task in rewards.values() if len(task) >= k]
    return [sum(map(any, d)) / len(d) for d in draws], [sum(map(all, d)) / len(d) for d in draws]


@settings(max_examples=60, deadline=None)
@given(ATTEMPTS)
def test_pass_rates_are_those_of_all_choices_of_k_attempts(attempts):
    values = aggregate(attempts)
    for env in ("all", "tracker", "booking_eu"):
        for k in range(1, 25):
            at, hat = counted(attempts, env, k)
            name = f"eval/{env}/pass_at_{k}"
            assert (name in values) == bool(at)
            if at:
                assert values[name] == pytest.approx(sum(at) / len(at))
                assert values[f"eval/{env}/pass_hat_{k}"] == pytest.approx(sum(hat) / len(hat))
                assert values[f"eval/{env}/num_tasks_at_{k}"] == len(at)
                assert -1e-12 <= values[f"{name}_low"] <= values[name] + 1e-12
                assert values[name] <= values[f"{name}_high"] + 1e-12 and values[f"{name}_high"] <= 1


def test_attempts_that_were_not_graded_are_counted_and_are_no_zeros():
    values = aggregate([Attempt("e", "a", 1.0), Attempt("e", "a", None), Attempt("e", "b", None)])
    assert {name: values[f"eval/e/{name}"] for name in ("num_tasks", "num_samples", "not_graded")} == {
        "num_tasks": 1,
        "num_samples": 1,
        "not_graded": 2,
    }
    assert values["eval/e/pass_at_1"] == 1.0 and "eval/e/pass_at_2" not in values
    nothing = aggregate([Attempt("e", "a", None)])
    assert nothing["eval/all/not_graded"] == 1 and "eval/all/pass_at_1" not in nothing


def test_a_bootstrap_needs_two_tasks_and_every_number_is_finite():
    one, two = aggregate([Attempt("e", "a", 1.0)]), aggregate([Attempt("e", "a", 1.0), Attempt("e", "b", 0.0)])
    assert "eval/e/pass_at_1_bootstrap_low" not in one
    assert (two["eval/e/pass_at_1_bootstrap_low"], two["eval/e/pass_at_1_bootstrap_high"]) == (0.0, 1.0)
    assert all(math.isfinite(value) for value in (*one.values(), *two.values()))


def test_the_aggregated_file_is_what_the_lines_beside_it_give(tmp_path):
    groups = make_groups(12, samples=3)
    groups[0].trajectories[1].outcome = Ungraded("the judge failed")
    files = dump_eval(tmp_path / "dump", groups, Tokenizer())
    assert [file.name for file in files] == ["tracker.jsonl", "booking_eu.jsonl", "aggregated_results.jsonl"]
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == sorted(file.name for file in files)
    lines = [json.loads(line) for file in files[:2] for line in file.read_text().splitlines()]
    (written,) = map(json.loads, files[2].read_text().splitlines())
    # As SkyRL reads its dumps: the reward is the last score, the task stands in the extras.
    read = [Attempt(line["data_source"], line["env_extras"]["task_key"], line["score"][-1]) for line in lines]
    assert len(read) == 36 and sum(a.reward is None for a in read) == 10
    assert written == aggregate(read)
    assert written["eval/all/not_graded"] == 10
    for k in (1, 2, 3):
        for env in ("all", "tracker", "booking_eu"):
            at, hat = counted(read, env, k)
            assert written[f"eval/{env}/pass_at_{k}"] == pytest.approx(sum(at) / len(at))
            assert written[f"eval/{env}/pass_hat_{k}"] == pytest.approx(sum(hat) / len(hat))
    reasons = {line["env_extras"].get("not_graded") for line in lines if line["score"][-1] is None}
    assert reasons == {"the judge failed", "reset: no answer in 60 s"}


@pytest.mark.parametrize("tokenizer", [Tokenizer(), None], ids=["tokens", "messages"])
def test_an_attempt_that_did_not_begin_is_no_zero_to_whoever_adds_its_scores_up(tmp_path, tokenizer):
    groups = make_groups(1, samples=3)
    never, unknown, solved = groups[0].trajectories
    never.ids, never.mask, never.logprobs, never.messages = never.ids[:0], never.mask[:0], never.logprobs[:0], []
    never.prompt_length, never.outcome = 0, InfraFailed("provision: no instance")
    unknown.outcome, solved.outcome = Ungraded("the judge failed"), Graded(1.0)
    dump_eval(tmp_path / "evals/global_step_3", groups, tokenizer)
    lines = [json.loads(line) for line in (tmp_path / "evals/global_step_3/tracker.jsonl").read_text().splitlines()]
    assert [line["score"][-1] for line in lines] == [None, None, 1.0] and lines[0]["score"] == [None]
    assert (lines[0]["input_prompt"], lines[0]["output_response"]) == ("", "")
    files = find_run(str(tmp_path), tmp_path).episodes
    found = [(e.reward, e.not_graded) for part in parts_of(files) for e in read_part(files, part)]
    assert found == [(None, "provision: no instance"), (None, "the judge failed"), (1.0, None)]


def test_a_dialogue_without_ids_is_dumped_as_it_was_and_is_read_again(tmp_path):
    groups = make_groups(1, samples=2)
    for trajectory in groups[0].trajectories:
        trajectory.outcome = Graded(0.25)
    trajectory = groups[0].trajectories[0]
    trajectory.messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look \ud800."},
        {"role": "assistant", "content": "<think>where?</think>a<done"},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "b<done>"},
        {"role": "note", "content": "nobody reads this"},
    ]
    dump_eval(tmp_path / "eval_only", groups, None)
    line = json.loads((tmp_path / "eval_only/tracker.jsonl").read_text().splitlines()[0])
    assert line["score"] == [0.25] and line["input_prompt"].endswith("Look ?.<|im_end|>\n<|im_start|>assistant\n")
    files = find_run(str(tmp_path), tmp_path).episodes
    found = next(e for part in parts_of(files) for e in read_part(files, part))
    assert found.prompt == (("system", "Be brief."), ("user", "Look ?."))
    assert [(turn.text, turn.observation) for turn in found.turns] == [
        ("<think>where?</think>a<done", "one\ntwo"),
        ("b<done>", None),
    ]


def test_a_dump_replaces_the_one_before_and_a_failed_one_changes_nothing(tmp_path):
    dump_eval(tmp_path, make_groups(4), Tokenizer())
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}

    class Broken:
        def decode(self, ids):
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        dump_eval(tmp_path, make_groups(2), Broken())
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
    dump_eval(tmp_path, make_groups(1), Tokenizer())  # of one environment alone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aggregated_results.jsonl", "tracker.jsonl"]


def test_dumps_lie_where_skyrl_has_them():
    root = Path("evals")
    assert eval_folder(root, 10, "sampled") == root / "global_step_10"
    assert eval_folder(root, 10, "greedy") == root / "global_step_10/greedy"
    assert eval_folder(root, None, "sampled") == root / "eval_only"


def test_a_result_says_which_versions_sampled_its_tokens():
    groups = make_groups(3)
    result = evaluate_groups("sampled", 7, 2, groups)
    assert (result.version, result.oldest_version, result.newest_version) == (2, 2, 3)
    groups[0].trajectories[0].outcome = Graded(1.0)
    groups[0].trajectories[0].spans = []
    assert evaluate_groups("sampled", 7, 2, groups[:1]).oldest_version == 2


@pytest.fixture
def config(tmp_path):
    keys = ["--trainer.eval_interval", "3", "--buffer.max_staleness", "1", "--output_dir", str(tmp_path)]
    return load_config(Path("configs/demo.yaml"), keys)


def due(evaluator: Evaluator, last: int, first: int = 0, every: int = 1) -> list[int]:
    return [step for step in range(first, last + 1, every) if evaluator.is_due(step)]


def test_evaluations_beside_training_are_due_every_interval(config, tmp_path):
    assert due(Evaluator(config, None, None, tmp_path), 10) == [3, 6, 9]
    # Of steps that pass faster than anybody looks, the newest is evaluated.
    assert due(Evaluator(config, None, None, tmp_path), 20, every=4) == [4, 8, 12, 16, 20]
    without = config.model_copy(update={"trainer": config.trainer.model_copy(update={"eval_interval": None})})
    assert due(Evaluator(without, None, None, tmp_path), 10) == []


@pytest.mark.parametrize(("step", "expected"), [(6, [6, 9]), (7, [9]), (0, [3, 6, 9])])
def test_a_resumed_run_evaluates_its_step_again_but_no_earlier_one(config, tmp_path, step, expected):
    evaluator = Evaluator(config, None, None, tmp_path)
    evaluator.resume_at(step)
    assert due(evaluator, 10, first=step) == expected


def test_one_that_falls_due_while_another_runs_is_left_out_with_a_warning(config, tmp_path, caplog):
    class Call:
        future = Future

    class Conductor:
        class evaluate:  # noqa: N801
            @staticmethod
            def remote(*arguments, **options):
                return Call

    class Inputs:
        eval_tasks = ()

    evaluator = Evaluator(config, Inputs, Conductor, tmp_path)
    evaluator.begin(3, 3, beside=True)
    assert due(evaluator, 7, first=4) == []
    assert "step 6 is not evaluated: the evaluation of step 3 is still running" in caplog.text


def test_seeds_are_given_only_where_something_can_be_repeated(config):
    assert [a.sampling.seed for a in attempts_of_run(config)] == [1, 1]
    assert [a.sampling.seed for a in attempts_of_run(config, beside=True)] == [None, None]
    assert [(a.label, a.n, a.sampling.temperature) for a in attempts_of_run(config)] == [
        ("sampled", 2, 1.0),
        ("greedy", 1, 0.0),
    ]
