"""The main metrics on Ray's Prometheus endpoint."""

from __future__ import annotations

import re
import time

import httpx
import pytest
import ray

from serve.ray_start import start_ray
from train.tracking import RayMetrics

DEADLINE_S = 60.0


@pytest.fixture
def endpoint():
    """The metrics address of a Ray that this test starts and ends."""
    start_ray(
        "local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        logging_level="error",
        _system_config={"metrics_report_interval_ms": 1000},
    )
    node = ray.nodes()[0]
    yield f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    ray.shutdown()


def samples(text: str, name: str) -> dict[str, float]:
    """Values of one metric by environment."""
    found = {}
    for labels, value in re.findall(rf"^{name}\{{(.*?)\}} (\S+)$", text, re.MULTILINE):
        if 'run="demo"' in labels:
            found[re.search(r'env="([^"]*)"', labels)[1]] = float(value)
    return found


def buckets(text: str) -> dict[float, float]:
    """Groups by the upper end of their bucket, all smaller ones included."""
    found = re.findall(r"^ray_fleet_rl_staleness_versions_bucket\{(.*?)\} (\S+)$", text, re.MULTILINE)
    return {float(re.search(r'le="([^"]*)"', labels)[1]): float(value) for labels, value in found}


def test_metrics_reach_rays_prometheus_endpoint_with_run_and_environment(endpoint):
    metrics = RayMetrics("demo")
    values = {"reward/avg_raw_reward": 0.5, "reward/github/pass_at_4": 0.75, "reward/zillow/pass_at_4": 0.25}
    expected = {
        "ray_fleet_rl_reward_avg_raw_reward": {"": 0.5},
        "ray_fleet_rl_reward_env_pass_at_4": {"github": 0.75, "zillow": 0.25},
    }
    lags = {"staleness/groups": 12, "staleness/share_lag_0": 0.25, "staleness/share_lag_2": 0.75, "staleness/max": 2}
    for batch in (lags, {"reward/avg_raw_reward": 0.5}, lags):
        metrics.observe(batch)
    deadline = time.monotonic() + DEADLINE_S
    seen, text = {}, ""
    while (seen != expected or not buckets(text)) and time.monotonic() < deadline:
        metrics.set(values)
        time.sleep(1.0)
        try:
            text = httpx.get(endpoint, timeout=5).text
        except httpx.TransportError:
            continue  # the agent that serves it is still starting
        seen = {name: samples(text, name) for name in expected}
    assert seen == expected
    assert [buckets(text)[end] for end in (0.5, 1.5, 2.5, float("inf"))] == [6, 6, 24, 24]
