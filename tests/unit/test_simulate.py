"""The simulator against closed forms, against itself, and as a command."""

import json
import math

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.replay_buffer_core import TicketState
from deploy.simulate import main
from train.config import ConfigError
from train.simulation.config import Distribution, SimulationConfig, full_key, load_simulation
from train.simulation.fit import fit
from train.simulation.prediction import predict
from train.simulation.simulator import Deadlock, Simulation, ThroughputCurve
from train.simulation.station import Station

READY_S, TOKENS, TOOLS_S, STEP_S, SYNC_S = 3.0, 100.0, 7.0, 20.0, 2.0


def constant(value):
    return {"p50": value, "p99": value}


def configured(**changes):
    """All times constant, one request at 10 tokens/s, no bend in the curve before a hundred requests."""
    sizes = {
        "trainer": {"train_batch_size": 4},
        "generator": {"n_samples_per_prompt": 2, "max_inflight_episodes": 100},
        "policy": {"throughput": {1: 10.0, 100: 1000.0}},
        "episode": {"ready_s": constant(READY_S), "tokens": constant(TOKENS), "tools_s": constant(TOOLS_S)},
        "learner": {"step_s": constant(STEP_S), "sync_s": constant(SYNC_S)},
    }
    return load_simulation(None, sizes, {key: str(value) for key, value in changes.items()})


def simulated(**changes):
    return Simulation(configured(**changes)).run()


# Stations


class Job:
    gone = False


def served(demands, speeds):
    """When each job is done, where ``speeds`` [jobs] is the speed of each by the number of jobs there are."""
    station, now, done = Station(), 0.0, {}
    jobs = {Job(): index for index in range(len(demands))}
    for job, index in jobs.items():
        station.add(job, demands[index])
    while station.jobs:
        station.speed = speeds(station.jobs)
        now = station.due()
        station.advance(now)
        done[jobs[station.pop()]] = now
    return [done[index] for index in range(len(demands))]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12))
def test_jobs_that_share_a_server_end_when_processor_sharing_says(demands):
    ends = served(demands, lambda jobs: 1.0 / jobs)
    for demand, end in zip(demands, ends, strict=True):
        # Every other job was served until it was done, or as long as this one.
        assert end == pytest.approx(sum(min(demand, other) for other in demands), rel=1e-9)


def test_a_job_that_is_removed_no_longer_takes_its_share():
    station = Station(0.5)
    gone, stays = Job(), Job()
    station.add(gone, 10.0)
    station.add(stays, 10.0)
    station.advance(10.0)
    station.remove(gone)
    station.speed = 1.0
    assert station.jobs == 1 and station.due() == 15.0 and station.pop() is stays
    assert station.due() == math.inf


@given(st.floats(0, 400))
def test_the_throughput_curve_is_straight_between_its_points_and_level_beyond(requests):
    points = {256: 5600.0, 1: 55.0, 64: 2650.0}
    expected = np.interp(requests, [0, 1, 64, 256], [0, 55.0, 2650.0, 5600.0])
    assert ThroughputCurve(points)(requests) == pytest.approx(expected)


def test_a_distribution_has_the_quantiles_it_was_given():
    drawn = Distribution(p50=2.0, p99=30.0).draw(np.random.default_rng(1), 200_000)
    assert np.quantile(drawn, [0.5, 0.99]) == pytest.approx([2.0, 30.0], rel=0.03)


# Closed forms

ALONE_S = READY_S + TOKENS / 10.0 + TOOLS_S


def test_in_the_synchronous_order_a_step_is_the_sum_of_its_parts():
    steps = simulated(**{"buffer.max_staleness": 0}).steps
    assert [step.step_s for step in steps] == pytest.approx([ALONE_S + STEP_S + SYNC_S] * len(steps))
    assert {lag for step in steps for lag in step.lags} == {0}


def test_where_rollouts_are_fast_the_learner_never_waits():
    prediction = predict(simulated(**{"buffer.max_staleness": 2}))
    assert prediction.step_s == pytest.approx(STEP_S + SYNC_S) and prediction.learner_utilisation == pytest.approx(1.0)
    assert prediction.limit.startswith("the learner")


def test_where_the_policy_is_slow_a_step_takes_its_tokens():
    changes = {
        "policy.throughput": "{1: 10.0}",
        "policy.num_replicas": 2,
        "steps": 60,
        "learner.sync_s": "{p50: 0, p99: 0}",
    }
    prediction = predict(simulated(**changes))
    assert prediction.step_s == pytest.approx(4 * 2 * TOKENS / 20.0, rel=0.02)
    assert prediction.policy_utilisation == pytest.approx(1.0, abs=0.01)
    assert prediction.tokens_per_s == pytest.approx(20.0, rel=0.02)
    assert prediction.limit.startswith("the policy")


def test_the_policy_pauses_while_weights_are_published():
    slow = predict(simulated(**{"buffer.max_staleness": 0, "learner.sync_s": "{p50: 100, p99: 100}"}))
    assert slow.step_s == pytest.approx(ALONE_S + STEP_S + 100.0)
    busy = {"policy.throughput": "{1: 10.0}", "learner.sync_s": "{p50: 50, p99: 50}", "steps": 60}
    assert predict(simulated(**busy)).step_s == pytest.approx(4 * 2 * TOKENS / 10.0 + 50.0, rel=0.02)


def test_littles_law_holds():
    changes = {"episode.tools_s": "{p50: 5, p99: 60}", "generator.max_inflight_episodes": 40, "steps": 300}
    prediction = predict(simulated(**changes, **{"learner.sync_s": "{p50: 0, p99: 0}"}))
    episodes_s = prediction.tokens_per_s / TOKENS
    mean_tools_s = 5 * math.exp((math.log(12) / 2.3263) ** 2 / 2)
    assert prediction.generating == pytest.approx(episodes_s * 10.0, rel=0.02)
    assert prediction.episodes - prediction.generating == pytest.approx(episodes_s * (READY_S + mean_tools_s), rel=0.05)


def test_instances_are_a_bound_that_episodes_queue_at():
    changes = {"environment.max_instances": 4, "buffer.max_staleness": 3, "steps": 50}
    prediction = predict(simulated(**changes))
    assert prediction.episodes <= 4 and prediction.waiting_for_instance > 4
    assert prediction.step_s == pytest.approx(4 * 2 * ALONE_S / 4, rel=0.15)
    assert prediction.limit.startswith("instances")


def test_learner_and_rollouts_slow_each_other_down_on_one_host():
    host = {"host.cores": 2, "host.episode_cpu": 0.5, "host.rollout_threads": 3, "host.learner_threads": 1}
    alone = simulated(**host, **{"buffer.max_staleness": 0})
    # Eight episodes want four cores and have three threads: two cores for them all.
    assert alone.steps[-1].wait_s == pytest.approx(ALONE_S * 2)
    assert alone.steps[-1].train_s == pytest.approx(STEP_S)
    together = simulated(**host, **{"buffer.max_staleness": 4, "steps": 100})
    assert predict(together).step_s > predict(simulated(**{"buffer.max_staleness": 4})).step_s
    # The learner is one of four threads on two cores wherever six or more episodes run.
    assert max(step.train_s for step in together.steps) == pytest.approx(STEP_S * 2, rel=0.01)


# What always holds


@given(
    seed=st.integers(0, 100),
    staleness=st.integers(0, 3),
    window=st.sampled_from([None, 4, 6]),
    mode=st.sampled_from(["count", "resample"]),
    instances=st.sampled_from(["null", "7"]),
)
@settings(max_examples=25, deadline=None)
def test_bounds_and_account_hold_whatever_the_sizes(seed, staleness, window, mode, instances):
    simulation = simulated(
        **{
            "seed": seed,
            "buffer.max_staleness": staleness,
            "buffer.window": "null" if window is None else window,
            "buffer.zero_variance_groups": mode,
            "environment.max_instances": instances,
            "episode.zero_variance": 0.3,
            "episode.infra_failed": 0.2,
            "episode.ungraded": 0.1,
            "episode.hang": 0.05,
            "episode.group_timeout_s": 200,
            "episode.tools_s": "{p50: 5, p99: 100}",
        }
    )
    assert all(0 <= lag <= staleness for step in simulation.steps for lag in step.lags)
    core = simulation.core
    assert core.ledger.balanced and core.trained_steps == len(simulation.steps) == 35
    if window == 4:
        assert "stale" not in core.dropped, "in the order of their starts, groups are fresh by construction"


def test_a_seed_gives_the_same_run_again():
    changes = {"episode.tools_s": "{p50: 5, p99: 100}", "faults.replica_mtbf_h": 0.05, "policy.num_replicas": 3}
    first, again = (predict(simulated(**changes)) for _ in range(2))
    assert first == again
    assert first != predict(simulated(**changes, seed=1))


def test_48_hours_with_deaths_of_everything_end_with_an_exact_account():
    simulation = simulated(
        **{
            "steps": 10**6,
            "max_hours": 48,
            "policy.num_replicas": 3,
            "generator.num_workers": 3,
            "environment.max_instances": 60,
            "buffer.max_staleness": 2,
            "buffer.zero_variance_groups": "resample",
            "episode.zero_variance": 0.3,
            "episode.infra_failed": 0.02,
            "episode.ungraded": 0.02,
            "episode.hang": 0.002,
            "episode.group_timeout_s": 600,
            "episode.tokens": "{p50: 300, p99: 1500}",
            "episode.tools_s": "{p50: 10, p99: 100}",
            "faults.replica_mtbf_h": 3,
            "faults.worker_mtbf_h": 4,
            "faults.learner_mtbf_h": 2,
        }
    )
    core, ledger = simulation.core, simulation.core.ledger
    assert min(simulation.deaths[who] for who in ("replica", "worker", "learner")) >= 10
    assert core.trained_steps > 1000 and simulation.now > 47.9 * 3600
    # By another way than the ledger's own sum: every group that was ever started is somewhere.
    started = core.state()["next_id"]
    assert started == core.running + core.buffered + sum(
        core.count(s) for s in (TicketState.TRAINING, TicketState.TRAINED, TicketState.DROPPED)
    )
    assert ledger.balanced and ledger.dispatched == 2 * started
    assert ledger.in_flight == sum(len(t["episode_ids"]) for t in core.state()["tickets"] if t["header"] is None)
    assert set(core.dropped) == {"stale", "too_few_graded", "failed", "zero_variance"}
    # A version for every step, and for every learner that started again; the last one may not be up yet.
    assert simulation.deaths["learner"] - (core.version - core.trained_steps) in (0, 1)
    assert all(0 <= lag <= 2 for step in simulation.steps for lag in step.lags)


def test_a_run_in_which_nothing_can_happen_says_so_and_does_not_hang():
    simulation = Simulation(configured())
    simulation.core.drain("nothing more")
    with pytest.raises(Deadlock, match="nothing happens after 0 s: 0 of 4 groups are buffered; no ticket is out"):
        simulation.run()


class Watched(Simulation):
    """After each event, a learner that could begin a batch has begun it."""

    def _happen(self, end):
        went_on = super()._happen(end)
        assert self._batch is not None or not self._learner_up or self.core.take() is None, f"at {self.now:.0f} s"
        return went_on


@pytest.mark.parametrize(
    "changes",
    [
        {"episode.hang": 0.05, "episode.group_timeout_s": 60},
        {"generator.num_workers": 4, "faults.worker_mtbf_h": 0.1},
    ],
    ids=["late groups", "dead workers"],
)
def test_a_group_that_is_abandoned_leaves_its_place_in_the_window_at_once(changes):
    window = {"buffer.window": 4, "buffer.max_staleness": 2, "episode.tools_s": "{p50: 5, p99: 50}", "steps": 100}
    simulation = Watched(configured(**window, **changes)).run()
    assert simulation.core.dropped["failed"] > 5


def test_a_group_beyond_its_deadline_is_abandoned_also_where_nothing_hangs():
    changes = {"episode.tools_s": "{p50: 5, p99: 50}", "episode.group_timeout_s": 40, "steps": 100}
    simulation = simulated(**changes)
    assert simulation.core.dropped["failed"] > 5 and simulation.core.ledger.balanced


def test_a_run_whose_groups_are_all_late_says_so_and_does_not_go_on_for_a_year(capsys):
    assert main(["--throughput", "{1: 0.05}"]) == 1
    expected = "fleet-rl: 1,281 groups in a row took longer than episode.group_timeout_s, 2400 s\n"
    assert capsys.readouterr().err == expected


def test_all_replicas_may_be_dead_for_a_while():
    changes = {"faults.replica_mtbf_h": 0.01, "faults.replica_restart_s": 300, "steps": 60}
    simulation = simulated(**changes)
    assert len(simulation.steps) == 65 and simulation.deaths["replica"] > 5 and simulation.core.ledger.balanced
    assert max(step.wait_s for step in simulation.steps) > 200


# Fits


def write_run(folder, truth, *, slowed=1.0, shared_host=False, parquet=False):
    """What a run with the sizes of ``truth`` would leave; under load all its phases take ``slowed`` times as long."""
    simulation = Simulation(truth).run()
    rng = np.random.default_rng(5)
    batch, size = truth.trainer.train_batch_size, truth.generator.n_samples_per_prompt
    (folder / "trajectories").mkdir(parents=True)
    if shared_host:
        (folder / "local_fleet.log").touch()
    lines = []
    for number, step in enumerate(simulation.steps, start=1):
        lines.append(
            {
                "step": number,
                "time": step.ended,
                "timing/step": step.step_s,
                "timing/wait_for_batch": step.wait_s,
                "timing/publish": step.sync_s,
                "staleness/mean": float(np.mean(step.lags)),
                "staleness/max": max(step.lags),
                "buffer/running": truth.generator.max_inflight_episodes // size,
                "buffer/buffered": 0,
                "buffer/trained": number * batch,
            }
        )
        write_batch(folder / "trajectories" / f"step_{number:06d}", truth, rng, slowed, parquet)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return simulation


def write_batch(stem, truth, rng, slowed, parquet):
    episode, size = truth.episode, truth.generator.n_samples_per_prompt
    count = truth.trainer.train_batch_size * size
    columns = [d.draw(rng, count) for d in (episode.ready_s, episode.tokens, episode.tools_s)]
    rows = []
    for index, (ready, tokens, tools) in enumerate(zip(*columns, strict=True)):
        phases = {"provision": ready / 2, "reset": ready / 2, "generate": tokens / 10, "step": tools / 2}
        phases = {name: slowed * seconds for name, seconds in (phases | {"verify": tools / 2}).items()}
        row = {"group_id": index // size, "mask": [0, *[1] * round(tokens)], "turns": 4}
        rows.append(row | {"duration_s": sum(phases.values()), "phase_s": phases})
    if parquet:
        write_parquet(stem.with_suffix(".parquet"), rows)
    else:
        stem.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from train.trajectory_table import SCHEMA

    names = ("group_id", "mask", "turns", "duration_s", "phase_s")
    schema = pa.schema([SCHEMA.field(name) for name in names])
    phases = [[{"phase": k, "seconds": v} for k, v in row["phase_s"].items()] for row in rows]
    columns = {name: [row[name] for row in rows] for name in names} | {"phase_s": phases}
    pq.write_table(pa.Table.from_pydict(columns, schema), path)


TRUTH = {
    "episode.ready_s": "{p50: 3, p99: 9}",
    "episode.tokens": "{p50: 100, p99: 400}",
    "episode.tools_s": "{p50: 7, p99: 40}",
    "buffer.max_staleness": 2,
    "generator.max_inflight_episodes": 24,
    "steps": 60,
}


@pytest.mark.parametrize("parquet", [False, True], ids=["jsonl", "parquet"])
def test_a_fit_finds_the_sizes_and_predicts_the_run_and_its_synchronous_order(tmp_path, parquet):
    truth = predict(write_run(tmp_path / "run", configured(**TRUTH), parquet=parquet))
    found = fit(tmp_path / "run")
    config = load_simulation(None, found.config, {})
    assert config.trainer.train_batch_size == 4 and config.buffer.max_staleness == 2
    assert config.generator.n_samples_per_prompt == 2 and config.generator.max_inflight_episodes == 24
    assert config.episode.tools_s.p50 == pytest.approx(7, rel=0.1) and config.episode.tools_s.p99 == pytest.approx(
        40, rel=0.3
    )
    again = predict(Simulation(config, found.measured).run())
    assert again.step_s == pytest.approx(truth.step_s, rel=0.1)
    assert again.step_s == pytest.approx(found.observed["step_s"], rel=0.1)
    assert again.staleness_mean == pytest.approx(truth.staleness_mean, rel=0.15)
    synchronous = {"buffer.max_staleness": "0"}
    real = predict(simulated(**TRUTH | synchronous))
    predicted = predict(Simulation(load_simulation(None, found.config, synchronous), found.measured).run())
    assert predicted.step_s == pytest.approx(real.step_s, rel=0.1)


def test_a_fit_reads_a_run_that_goes_on_and_takes_null_for_missing(tmp_path):
    write_run(tmp_path / "run", configured(**TRUTH))
    path, expected = tmp_path / "run/metrics.jsonl", fit(tmp_path / "run").config
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    evaluations = [{"step": row["step"], "timing/step": None, "staleness/max": None} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for pair in zip(rows, evaluations, strict=True) for row in pair))
    with path.open("a") as file:
        file.write('{"step": 66, "timing/st')
    (tmp_path / "run/trajectories/step_000066.jsonl").touch()  # a step whose trajectories are still on their way
    assert fit(tmp_path / "run").config == expected


def test_a_run_that_had_nothing_in_flight_when_it_was_asked_is_fitted_with_one_group(tmp_path):
    write_run(tmp_path / "run", configured(**TRUTH))
    path = tmp_path / "run/metrics.jsonl"
    rows = [json.loads(line) | {"buffer/running": 0} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_simulation(None, fit(tmp_path / "run").config, {})
    assert found.generator.max_inflight_episodes == found.generator.n_samples_per_prompt == 2


def test_on_one_host_the_load_is_divided_out_of_what_was_measured(tmp_path):
    write_run(tmp_path / "run", configured(**TRUTH), slowed=3.0, shared_host=True)
    found = fit(tmp_path / "run")
    config = load_simulation(None, found.config, {})
    simulation = Simulation(config, found.measured).run()
    assert simulation.averages.episodes / simulation.averages.ended == pytest.approx(
        found.observed["episode_s"], rel=0.02
    )
    learner_s = np.mean([step.train_s + step.sync_s for step in simulation.steps[5:]])
    assert learner_s == pytest.approx(STEP_S + SYNC_S, rel=0.02)
    assert config.learner.step_s.p50 < STEP_S and config.episode.ready_s.p50 < 3.0


# The command


def test_a_table_says_what_limits_the_run(capsys):
    assert main(["--steps", "5", "--faults.replica_mtbf_h=0.05", "--max_staleness", "1"]) == 0
    out = capsys.readouterr().out
    assert "staleness of trained groups  0: " in out and "the ledger of " in out and "balances" in out
    assert "what limits it: " in out and "deaths  replica: " in out


def test_a_sweep_as_json_has_a_row_for_each_value(capsys):
    assert main(["--steps", "5", "--sweep", "max_staleness=0,1,4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sweep"] == "buffer.max_staleness"
    assert [row["buffer.max_staleness"] for row in found["rows"]] == ["0", "1", "4"]
    steps = [row["step_s"] for row in found["rows"]]
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[2]


def test_what_was_simulated_can_be_saved_and_simulated_again(tmp_path, capsys):
    saved = tmp_path / "sim.yaml"
    assert main(["--steps", "5", "--tokens.p50", "700", "--json", "--save", str(saved)]) == 0
    first = capsys.readouterr().out
    assert yaml.safe_load(saved.read_text())["episode"]["tokens"]["p50"] == 700
    assert main(["--config", str(saved), "--json"]) == 0
    assert capsys.readouterr().out == first and [path.name for path in tmp_path.iterdir()] == ["sim.yaml"]


def test_from_a_run_the_table_shows_what_the_run_was_and_a_given_size_replaces_the_measured_ones(tmp_path, capsys):
    write_run(tmp_path / "run", configured(**TRUTH))
    assert main(["--from-run", str(tmp_path / "run")]) == 0
    assert "simulated" in (table := capsys.readouterr().out) and "the run was" in table
    steps = []
    for more in ([], ["--learner.step_s.p50", "500", "--learner.step_s.p99", "500"]):
        assert main(["--from-run", str(tmp_path / "run"), "--json", *more]) == 0
        steps.append(json.loads(capsys.readouterr().out)["step_s"])
    assert steps[0] < 100 and steps[1] > 500


def test_keys_lists_every_key(capsys):
    assert main(["--keys"]) == 0
    listed = capsys.readouterr().out
    assert "buffer.max_staleness: 4" in listed and "episode.tokens.p99: 8000.0" in listed and "host.cores" in listed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max_stalenes", "3"], "the nearest known key is 'buffer.max_staleness'"),
        (["--p50", "3"], "may be episode.ready_s.p50 or "),
        (["--max_staleness"], "--max_staleness needs a value"),
        (["3"], "'3' is no key"),
        (["--max_staleness", "-1"], "'buffer.max_staleness': input should be greater than or equal to 0, got -1"),
        (["--max_staleness", "[1"], "'[1' is no value"),
        (["--tokens.p50", "9000"], "p99 8000.0 does not fit p50 9000.0"),
        (["--tokens.p50", ".nan"], "episode.tokens.p50"),
        (["--buffer.window", "3"], "buffer.window 3 never holds a batch of 64 groups"),
        (["--max_inflight_episodes", "3"], "holds no group of generator.n_samples_per_prompt 8"),
        (["--throughput", "{}"], "throughput needs at least one point"),
        (["--config", "/does/not/exist.yaml"], "configuration file /does/not/exist.yaml does not exist"),
        (["--sweep", "max_staleness"], "write KEY=VALUE,VALUE"),
        (["--sweep", "nothing=1"], "unknown key 'nothing'"),
        (["--from-run", "/does/not/exist"], "/does/not/exist/metrics.jsonl cannot be read"),
        (["--max_hours", "0.0001"], "raise max_hours or lower warmup_steps"),
        (["--save", "/does/not/exist/file.yaml", "--steps", "1"], "No such file or directory"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, words, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("fleet-rl: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("metrics.jsonl", "no json\n", "run/metrics.jsonl, line 1: no line of metrics"),
        ("metrics.jsonl", '{"step": 1, "timing/step": 1}\n' * 3, "holds 3 training steps; a fit needs at least 10"),
        ("metrics.jsonl", '{"step": 1, "timing/step": 1, "time": 1}\n' * 20, "a step has no timing/publish"),
        (
            "metrics.jsonl",
            '{"step": 1, "timing/step": 1, "time": null, "timing/publish": 0, "timing/wait_for_batch": "1"}\n' * 20,
            "a step has no time\n",
        ),
        ("trajectories/step_000009.jsonl", "", "the files of steps beyond 5 are empty"),
        ("trajectories/step_000009.jsonl", "[]\n", "step_000009.jsonl cannot be read"),
        ("trajectories/step_000009.jsonl", '{"group_id": 1}\n' * 2, "step_000009.jsonl: a trajectory has no 'phase_s'"),
        ("trajectories/step_000009.parquet", "PAR1", "step_000009.parquet cannot be read"),
    ],
)
def test_a_broken_run_is_one_line(tmp_path, name, text, words, capsys):
    write_run(tmp_path / "run", configured(**TRUTH))
    for old in (tmp_path / "run/trajectories").iterdir():
        if name.startswith("traj"):
            old.unlink()
    (tmp_path / "run" / name).write_text(text)
    assert main(["--from-run", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_run_without_trajectories_says_how_to_get_them(tmp_path, capsys):
    write_run(tmp_path / "run", configured(**TRUTH))
    for path in (tmp_path / "run/trajectories").iterdir():
        path.unlink()
    assert main(["--from-run", str(tmp_path / "run")]) == 2
    assert "run with --trainer.dump_trajectories true" in capsys.readouterr().err


def test_a_short_key_must_name_one_key():
    assert full_key("max_staleness") == "buffer.max_staleness" and full_key("tokens.p50") == "episode.tokens.p50"
    with pytest.raises(ConfigError):
        full_key("staleness")


def test_the_defaults_are_valid():
    assert SimulationConfig().host is None
