"""Where metrics go: ``metrics.jsonl`` always; Ray's metrics, TensorBoard and Weights & Biases as configured.

The file and Ray's metrics are written at once. TensorBoard and W&B live in a thread of their own, so that neither their
start nor a slow network holds a run up, and their failure costs their record, never the run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import re
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from train.config import RunConfig
from train.evaluate import EvalResult
from train.metrics import Metrics, eval_metrics, find_spec
from train.metrics_file import read_metrics
from train.resume import METRICS, STEP

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
WANDB_INIT_TIMEOUT_S = 60.0
LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)  # the last of each bucket of the histogram


_SECRET_NAME = re.compile(r"(^|_)(api_?key|secret|token|password|passwd|credentials?|access_key(_id)?)$", re.IGNORECASE)
_SECRET_TEXT = re.compile(r"\b(sk-[A-Za-z0-9_-]{8,}|AKIA[0-9A-Z]{12,}|xox[a-z]-[A-Za-z0-9-]{8,}|hf_[A-Za-z0-9]{16,})")
REDACTED = "[redacted]"
_SHARE_OF_LAG = re.compile(r"staleness/share_lag_(\d+)")


def default_run_name(modality: str) -> str:
    """``fleet_{modality}_{8 hex digits}``, as runs of this project are called in W&B."""
    return f"fleet_{modality}_{uuid.uuid4().hex[:8]}"


def redact(value: Any) -> Any:
    """A copy of a configuration without secrets: values under secret names, values that look like keys, and the values
    of this process's secret environment variables wherever they stand."""
    secrets = [v for k, v in os.environ.items() if len(v) >= 8 and _SECRET_NAME.search(k)]
    return _redact(value, secrets)


def _redact(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {k: REDACTED if v and _SECRET_NAME.search(str(k)) else _redact(v, secrets) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_redact(item, secrets) for item in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, REDACTED)
        return _SECRET_TEXT.sub(REDACTED, value)
    return value


class Tracker:
    """Records a run's metrics. A context manager; leaving it ends what it started within ``CLOSE_TIMEOUT_S``.

    Attributes:
        history: what was logged, one dict a call, with its ``step``.
        unknown: names that were logged but are not in the table of metrics.
    """

    def __init__(self, config: RunConfig) -> None:
        self.unknown: set[str] = set()
        self._config = config
        self._ray = RayMetrics(config.name)
        self._open()

    def _open(self) -> None:
        config, run_dir = self._config, self._config.run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self.history = _recorded(run_dir / METRICS)  # of a run that is resumed
        self._file = (run_dir / METRICS).open("a", encoding="utf-8")
        sinks: list[Callable[[], Sink]] = []
        if config.tracking.tensorboard:
            sinks.append(lambda: TensorBoardSink(run_dir / "tensorboard"))
        if config.tracking.wandb:
            dump = redact(config.model_dump(mode="json"))
            sinks.append(lambda: WandbSink(run_dir, config.name, config.tracking.project, dump))
        self._background = Background(sinks)

    def reopen(self) -> None:
        """After the run's folder was taken back to a checkpoint: go on from what it holds."""
        self.close()
        self._open()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record ``metrics`` at ``step``; without it, at their own ``trainer/global_step``."""
        step = int(metrics[STEP] if step is None else step)
        values = {name: float(value) for name, value in metrics.items()}
        for name in values.keys() - self.unknown:
            if find_spec(name) is None:
                self.unknown.add(name)
                logger.warning("metric %s is not in the table of train/metrics.py", name)
        self.history.append({"step": step, **values})
        line = {"step": step, "time": time.time(), **{k: v if math.isfinite(v) else None for k, v in values.items()}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._ray.set(values)
        self._ray.observe(values)
        self._background.put(step, values)

    def show(self, metrics: Mapping[str, float]) -> None:
        """What is so now, between two steps: for Ray's metrics only, where a run that stands still must be seen."""
        self._ray.set(metrics)

    def log_eval(self, result: EvalResult) -> None:
        """Record the pass rates of an evaluation at its step."""
        self.log(eval_metrics(result) | result.metrics, result.step)

    def close(self) -> None:
        self._background.close(CLOSE_TIMEOUT_S)
        self._file.close()


def _recorded(path: Path) -> list[dict[str, float]]:
    if not path.is_file():
        return []
    return [{name: value for name, value in row.items() if name != "time"} for row in read_metrics(path)]


class Sink:
    """A record of metrics that is written in the background."""

    def log(self, step: int, metrics: Metrics) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class TensorBoardSink(Sink):
    """Event files, written without torch or TensorFlow: importing either would cost a driver seconds and 200 MB."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory))

    def log(self, step: int, metrics: Metrics) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink(Sink):
    """Weights & Biases: online with ``WANDB_API_KEY``, otherwise offline; ``WANDB_MODE`` has the last word."""

    def __init__(self, run_dir: Path, name: str, project: str, config: dict[str, Any]) -> None:
        import wandb

        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_code=True,
            init_timeout=WANDB_INIT_TIMEOUT_S,
            finish_timeout=CLOSE_TIMEOUT_S / 2,
            finish_timeout_raises=False,
            # The command line is part of W&B's metadata.
            x_disable_meta=redact(sys.argv) != sys.argv,
        )
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")

        def start(mode: str) -> Any:
            # A run that is resumed goes on under its id; offline that is of no meaning before it is synced.
            resume = "allow" if mode == "online" else None
            return wandb.init(
                project=project,
                name=name,
                id=_wandb_id(run_dir),
                resume=resume,
                dir=str(run_dir),
                mode=mode,
                config=config,
                settings=settings,
            )

        try:
            self._run = start(mode)
        except wandb.errors.Error as error:
            if mode != "online":
                raise
            logger.warning("W&B cannot be reached (%s): this run is recorded offline under %s/wandb", error, run_dir)
            self._run = start("offline")
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({**metrics, STEP: step})

    def close(self) -> None:
        self._run.finish()


def _wandb_id(run_dir: Path) -> str:
    path = run_dir / "wandb_id"
    if not path.is_file():
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8")


class Background:
    """One thread that starts the sinks, feeds them, and ends them. A sink that fails is named once and left out."""

    def __init__(self, start: list[Callable[[], Sink]]) -> None:
        self._queue: queue.SimpleQueue[tuple[int, Metrics] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(start,), name="tracker", daemon=True)
        if start:
            self._thread.start()

    def put(self, step: int, metrics: Metrics) -> None:
        self._queue.put((step, metrics))

    def close(self, timeout_s: float) -> None:
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("TensorBoard or W&B did not end in %.0f s; metrics.jsonl is complete", timeout_s)

    def _run(self, start: list[Callable[[], Sink]]) -> None:
        sinks = [sink for sink in map(_guarded, start) if sink is not None]
        while (item := self._queue.get()) is not None:
            sinks = [sink for sink in sinks if _guarded(partial(_log, sink, *item))]
        for sink in sinks:
            _guarded(sink.close)


def _log(sink: Sink, step: int, metrics: Metrics) -> Sink:
    sink.log(step, metrics)
    return sink


def _guarded(action: Callable[[], Any]) -> Any:
    """The result of ``action``, or ``None`` after a warning: third-party writers may raise anything."""
    try:
        return action()
    except Exception as error:
        logger.warning("a record of metrics failed and is left out: %s: %s", type(error).__name__, error)
        return None


class RayMetrics:
    """Metrics on Ray's Prometheus endpoint, as ``ray_fleet_rl_…``: the latest value of each, with environments as tags,
    and the staleness of all groups so far as a histogram."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Any] = {}
        self._histogram: Any = None

    def set(self, metrics: Mapping[str, float]) -> None:
        """Each value that is a number becomes what its gauge shows."""
        if not _ray_runs():
            return
        from ray.util.metrics import Gauge

        for name, value in metrics.items():
            spec, env = find_spec(name) or (None, None)
            gauge_name = prometheus_name(name.replace(f"/{env}/", "/env/", 1) if env else name)
            if gauge_name not in self._gauges:
                description = spec.meaning if spec else name
                self._gauges[gauge_name] = Gauge(gauge_name, description=description, tag_keys=("run", "env"))
            if math.isfinite(value):
                self._gauges[gauge_name].set(value, tags={"run": self._run, "env": env or ""})

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Add the groups of a batch, if ``metrics`` are of one, to the histogram."""
        groups = metrics.get("staleness/groups")
        if groups is None or not _ray_runs():
            return
        from ray.util.metrics import Histogram

        if self._histogram is None:
            self._histogram = Histogram(
                "fleet_rl_staleness_versions",
                "groups trained on, by the lag of their oldest token in policy versions",
                boundaries=[lag + 0.5 for lag in LAGS],  # Ray takes none of 0
                tag_keys=("run",),
            )
        for name, share in metrics.items():
            if lag := _SHARE_OF_LAG.fullmatch(name):
                for _ in range(round(share * groups)):
                    self._histogram.observe(int(lag[1]), tags={"run": self._run})


def _ray_runs() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def prometheus_name(name: str) -> str:
    """A metric's name in the characters that Prometheus allows."""
    return "fleet_rl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
