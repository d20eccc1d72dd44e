"""Metric definitions against figures worked out by hand, and the table against the code and the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from actors.lineage import Lineage
from actors.trajectory import Cancelled, Graded, Group, InfraFailed, Outcome, Span, StopReason, Trajectory, Ungraded
from train import metrics
from train.evaluate import evaluate_groups

ROOT = Path(__file__).resolve().parents[2]


def attempt(
    outcome: Outcome | float,
    *,
    turns: int = 2,
    calls: int = 1,
    errors: int = 0,
    tokens: int = 4,
    versions: tuple[int, ...] = (0,),
    stop: StopReason = StopReason.DONE,
) -> Trajectory:
    """A trajectory of two prompt tokens and ``tokens`` sampled ones, evenly divided over ``versions``."""
    edges = np.linspace(0, tokens, len(versions) + 1).astype(int)
    spans = [Span(v, int(a), int(b)) for v, a, b in zip(versions, edges, edges[1:], strict=False) if b > a]
    mask = np.array([0, 0] + [1] * tokens, np.uint8)
    return Trajectory(
        trajectory_id="t",
        task_key="task",
        env_key="env",
        group_id=0,
        sample_index=0,
        ids=np.arange(tokens + 2, dtype=np.int32),
        mask=mask,
        logprobs=np.zeros(tokens + 2, np.float32),
        prompt_length=2,
        spans=spans,
        stop_reason=stop,
        outcome=Graded(outcome) if isinstance(outcome, float) else outcome,
        turns=turns,
        tool_calls=calls,
        tool_errors=errors,
    )


def group(env: str, *attempts: Trajectory) -> Group:
    return Group(0, "task", env, list(attempts))


BATCH = [
    group("a/b", attempt(1.0), attempt(0.0), attempt(Ungraded("judge down")), attempt(1.0)),  # 2 of 3
    group("a/b", attempt(0.0), attempt(0.0), attempt(0.0), attempt(0.0)),
    group("c", attempt(1.0), attempt(InfraFailed("no instance"), turns=0, tokens=0), attempt(Cancelled("stale"))),
    group("c", attempt(InfraFailed("lost")), attempt(Ungraded("verifier raised"))),
]


def test_reward_metrics_are_those_worked_out_by_hand():
    got = metrics.reward_metrics(BATCH, n=4)
    assert got["reward/avg_pass_at_4"] == pytest.approx(2 / 3)  # tasks 1 and 3 of the three with a grade
    assert got["reward/avg_pass_at_1"] == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert got["reward/avg_raw_reward"] == pytest.approx(3 / 8)  # eight graded attempts, none of the others
    assert got["reward/a_b/pass_at_4"] == pytest.approx(0.5)
    assert got["reward/a_b/variance_per_prompt"] == pytest.approx((2 / 9 + 0) / 2)  # p(1-p) with p = 2/3, and 0
    assert got["reward/a_b/signal_ratio"] == pytest.approx(0.5)
    assert got["reward/c/pass_at_4"] == 1.0
    # One graded attempt has no variance: it must not show as "no signal".
    assert "reward/c/signal_ratio" not in got and "reward/c/variance_per_prompt" not in got


def test_mean_positive_reward_keeps_both_of_its_historic_definitions():
    got = metrics.reward_metrics([group("e", attempt(0.5), attempt(-1.0), attempt(0.0), attempt(1.0))], n=4)
    assert got["reward/mean_positive_reward"] == pytest.approx(1.5 / 4)
    assert got["reward/e/mean_positive_reward"] == pytest.approx(0.75)


@pytest.mark.parametrize("groups", [[], [BATCH[3]]])
def test_without_a_grade_there_is_no_reward_metric(groups):
    assert metrics.reward_metrics(groups, n=4) == {}
    assert metrics.eval_group_metrics(groups, n=4) == {}


def test_environment_metrics_leave_out_episodes_that_never_began():
    groups = [
        group("x", attempt(1.0, turns=3, calls=4, errors=1), attempt(0.0, turns=5, calls=0, errors=0)),
        group("y", attempt(InfraFailed("no instance"), turns=0, calls=0), attempt(0.0, turns=2, calls=2, errors=2)),
    ]
    got = metrics.environment_metrics(groups)
    assert got["environment/x/avg_turns"] == 4 and got["environment/x/min_turns"] == 3
    assert got["environment/x/max_turns"] == 5 and got["environment/x/num_episodes"] == 2
    assert got["environment/x/tool_error_rate"] == pytest.approx(1 / 4)
    assert got["environment/x/tool_calls_per_turn"] == pytest.approx(4 / 8)
    assert got["environment/y/env_init_failed"] == 1 and got["environment/y/avg_turns"] == 2
    assert got["environment/avg_turns"] == pytest.approx(10 / 3)
    assert got["environment/tool_error_rate"] == pytest.approx(3 / 6)
    assert got["environment/total_episodes"] == 3 and got["environment/total_env_init_failed"] == 1
    assert got["environment/total_tool_errors"] == 3


def test_an_environment_without_a_tool_call_has_no_error_rate_of_nan():
    got = metrics.environment_metrics([group("x", attempt(0.0, calls=0))])
    assert got["environment/x/tool_error_rate"] == 0.0


def test_generate_metrics_count_sampled_tokens_by_reward_and_how_episodes_end():
    groups = [
        group("x", attempt(1.0, tokens=10), attempt(0.0, tokens=20, stop=StopReason.LENGTH)),
        group("x", attempt(Ungraded("judge"), tokens=30, stop=StopReason.TIMEOUT), attempt(0.5, tokens=40)),
    ]
    got = metrics.generate_metrics(groups)
    assert (got["generate/min_num_tokens"], got["generate/max_num_tokens"]) == (10, 40)
    assert got["generate/avg_num_tokens"] == 25
    assert got["generate/std_num_tokens"] == pytest.approx(np.std([10, 20, 30, 40]))
    assert got["generate/avg_tokens_non_zero_rewards"] == 25  # 10 and 40; the ungraded one is in neither mean
    assert got["generate/avg_tokens_zero_rewards"] == 20
    assert got["generate/stop_length"] == 0.25 and got["generate/stop_done"] == 0.5
    assert got["generate/trajectory_timeouts"] == 1 and got["generate/env_init_failures"] == 0


def test_staleness_takes_a_groups_oldest_token_and_weighs_tokens():
    groups = [
        group("x", attempt(1.0, tokens=4, versions=(5,)), attempt(0.0, tokens=4, versions=(3, 4))),
        group("x", attempt(1.0, tokens=8, versions=(5,)), attempt(0.0, tokens=0, versions=())),
    ]
    got = metrics.staleness_metrics(groups, Lineage([(0, 5, 0)]))
    assert got["staleness/max"] == 2 and got["staleness/mean"] == 1.0
    assert got["staleness/token_mean"] == pytest.approx((2 * 2 + 2 * 1) / 16)
    assert got["staleness/mixed_share"] == pytest.approx(1 / 3)
    assert got["staleness/share_lag_0"] == 0.5 and got["staleness/share_lag_2"] == 0.5


def test_evaluation_names_the_two_kinds_apart():
    sampled = metrics.eval_metrics(evaluate_groups("sampled", 7, 3, BATCH))
    greedy = metrics.eval_metrics(evaluate_groups("greedy", 7, 3, BATCH[:1]))
    assert sampled["eval/all/pass_at_1"] == pytest.approx(5 / 9) and sampled["eval/all/not_graded"] == 5
    assert sampled["eval/a_b/num_tasks"] == 2 and sampled["eval/all/num_samples"] == 8
    assert greedy["eval/all/greedy_pass_at_1"] == pytest.approx(2 / 3)
    assert not sampled.keys() & greedy.keys()
    more = metrics.eval_group_metrics(BATCH, n=4)
    assert more["eval/all/pass_at_4"] == pytest.approx(2 / 3) and more["eval/a_b/pass_at_4"] == 0.5
    assert not more.keys() & sampled.keys()


SNAPSHOT = {
    **{name: 1 for name in ("running", "issued", "dispatched", "generating", "buffered", "training", "trained")},
    **{name: 1 for name in ("bytes", "capacity", "version")},
    "lengths": {"trained": 30.0, "ended": 40.0, "bias": 0.75, "yield": 0.5},
    "dropped": {"stale": 2, "too_few_graded": 1},
    "zero_variance": {"all_solved": 3, "none_solved": 4},
    "ledger": {
        **{name: 1 for name in ("dispatched", "graded", "ungraded", "infra_failed", "cancelled", "in_flight")},
        "balanced": True,
        "reasons": {"infra_failed: lost": 1},
    },
}
COUNTERS = ("made", "reused", "deleted", "expired", "overdue", "failed", "refused", "heartbeats", "lost")
LEASES = {
    **{"leased": 3, "idle": 1, "making": 0, "deleting": 0, "waiting": 2, "capacity": None, "by_env": {}, "run_id": "r"},
    "breakers_open": 0,
    **{name: 1 for name in COUNTERS},
}


def computed() -> set[str]:
    """Every name that this module computes for a batch in which everything happens, and an evaluation."""
    values = [
        metrics.reward_metrics(BATCH, 4),
        metrics.environment_metrics(BATCH),
        metrics.generate_metrics(BATCH),
        metrics.staleness_metrics(BATCH, Lineage([(0, 1, 0)])),
        metrics.eval_group_metrics(BATCH, 4),
        metrics.buffer_metrics(SNAPSHOT),
        metrics.lease_metrics({**LEASES, "capacity": 8}),
    ]
    values += [metrics.eval_metrics(evaluate_groups(label, 0, 0, BATCH)) for label in ("sampled", "greedy")]
    return {name for value in values for name in value}


def test_every_computed_name_is_in_the_table_and_no_computed_family_is_left_out():
    names = computed()
    assert not [name for name in names if metrics.find_spec(name) is None]
    families = ("reward/", "eval/", "environment/", "staleness/", "length/", "buffer/", "ledger/", "leases/")
    described = {spec.name for spec in metrics.METRICS if spec.name.startswith(families)}
    found = {metrics.find_spec(name)[0].name for name in names if name.startswith(families)}
    assert described == found


def written_names() -> dict[str, Path]:
    """Metric names in the source of the packages; what an f-string fills in is ``{}``."""
    families = "|".join(sorted({spec.name.partition("/")[0] for spec in metrics.METRICS}))
    literal = re.compile(rf'"((?:{families})/[A-Za-z0-9_{{}}./]*[A-Za-z0-9_}}])"')
    found: dict[str, Path] = {}
    for package in ("serve", "actors", "train"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            names = literal.findall(text) + [f"timing/{phase}" for phase in re.findall(r'\btimer\("(\w+)"\)', text)]
            found |= {re.sub(r"\{[^}]*\}", "{}", name): path for name in names}
    return found


def test_every_name_written_in_the_source_is_in_the_table():
    def known(name: str) -> bool:
        # Filled in may be a number, a word, or part of a name.
        shape = re.compile(re.escape(name).replace(r"\{\}", ".*"))
        return metrics.find_spec(name) is not None or any(shape.fullmatch(spec.name) for spec in metrics.METRICS)

    unknown = {
        name: path for name, path in written_names().items() if not known(name.replace("eval/all/", "eval/{env}/"))
    }
    assert not unknown


def test_a_spec_is_found_for_one_name_only():
    assert metrics.find_spec("eval/all/pass_at_1")[0].name == "eval/{env}/pass_at_1"
    assert metrics.find_spec("eval/all/pass_at_3")[0].name == "eval/{env}/pass_at_{n}"
    assert metrics.find_spec("reward/github/pass_at_4") == (metrics.find_spec("reward/x/pass_at_2")[0], "github")
    assert metrics.find_spec("environment/avg_turns")[1] is None
    assert metrics.find_spec("reward/github/pass_rate") is None
    assert len({spec.name for spec in metrics.METRICS}) == len(metrics.METRICS)


def test_the_documentation_shows_the_table():
    assert metrics.markdown_table() in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_an_unknown_capacity_is_no_metric():
    assert "leases/capacity" not in metrics.lease_metrics(LEASES)
    assert metrics.lease_metrics(LEASES)["leases/waiting"] == 2
