"""``fleet-rl simulate``: what a run will take, before it is paid for.

Exit codes: 0 done, 1 the simulated run cannot go on, 2 wrong input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.simulation.config import SimulationConfig
    from train.simulation.fit import Fit
    from train.simulation.prediction import Prediction

# Given by hand, one of these replaces what the run of --from-run measured.
MEASURED_KEYS = {"episode": ("ready_s", "tokens", "tools_s"), "learner": ("step_s", "sync_s")}
FIGURES = (  # name in Prediction, words, unit
    ("step_s", "step", "s"),
    ("step_s_p99", "step, 99th percentile", "s"),
    ("wait_for_batch_s", "of it, the learner waits", "s"),
    ("learner_utilisation", "learner busy", "%"),
    ("policy_utilisation", "policy busy", "%"),
    ("tokens_per_s", "sampled", "tokens/s"),
    ("trained_tokens_per_s", "trained on", "tokens/s"),
    ("staleness_mean", "staleness, mean", "versions"),
    ("episodes", "episodes at once", ""),
    ("generating", "of them, generating", ""),
    ("waiting_for_instance", "waiting for an instance", ""),
    ("buffered_groups", "buffered", "groups"),
    ("buffered_groups_max", "buffered at most", "groups"),
    ("dropped_share", "groups dropped", "%"),
)
SWEPT = ("step_s", "learner_utilisation", "policy_utilisation", "trained_tokens_per_s", "staleness_mean")
SWEPT += ("buffered_groups", "dropped_share")


def main(arguments: Sequence[str]) -> int:
    options, pairs = _parse(arguments)
    from train.config import ConfigError
    from train.simulation.simulator import Deadlock

    try:
        return _simulate(options, _overrides(pairs))
    except (ConfigError, OSError) as error:
        return _complain(error, 2)
    except Deadlock as error:
        return _complain(error, 1)


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="fleet-rl simulate",
        usage="fleet-rl simulate [--from-run RUN] [--config FILE] [--sweep KEY=A,B,...] [--json] [--KEY VALUE ...]",
        description="Predict step time, utilisation and staleness of a run under a virtual clock.",
        epilog="--KEY VALUE sets a key of the simulation, such as --buffer.max_staleness 0; the last part of a key is "
        "enough where it is the only one. --keys lists them. Later ones win: --from-run, --config, --KEY.",
        allow_abbrev=False,
    )
    parser.add_argument("--from-run", metavar="RUN", type=Path, help="take all sizes from the folder of a real run")
    parser.add_argument("--config", metavar="FILE", type=Path, help="a YAML file of keys")
    parser.add_argument("--sweep", metavar="KEY=A,B,...", help="one line for each value of a key")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of a table")
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the keys as they were simulated, as YAML")
    parser.add_argument("--keys", action="store_true", help="list every key with its default, and end")
    return parser.parse_known_args(arguments)


def _overrides(pairs: list[str]) -> dict[str, str]:
    from train.config import ConfigError

    found: dict[str, str] = {}
    rest = iter(pairs)
    for argument in rest:
        key, has_value, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not key:
            raise ConfigError(f"'{argument}' is no key: write --KEY VALUE")
        if not has_value:
            value = next(rest, None)
        if value is None:
            raise ConfigError(f"--{key} needs a value")
        found[key] = value
    return found


def _simulate(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from train.simulation.config import SimulationConfig, load_simulation

    if options.keys:
        print("\n".join(_described(SimulationConfig, SimulationConfig().model_dump())))
        return 0
    fit = _fit(options.from_run)
    base = fit.config if fit else {}
    swept, values = _sweep(options.sweep)
    runs = [overrides | {swept: value} for value in values] if swept else [overrides]
    configs = [load_simulation(options.config, base, run) for run in runs]
    predictions = [_predict(config, fit) for config in configs]
    if options.save:
        _save(options.save, configs[0])
    print(_report(options, fit, swept, values, predictions))
    return 0


def _fit(run: Path | None) -> Fit | None:
    if run is None:
        return None
    from train.simulation.fit import fit

    return fit(run)


def _sweep(text: str | None) -> tuple[str | None, list[str]]:
    from train.config import ConfigError
    from train.simulation.config import full_key

    if text is None:
        return None, []
    key, _, values = text.partition("=")
    found = [value for value in values.split(",") if value.strip()]
    if not found:
        raise ConfigError(f"--sweep {text}: write KEY=VALUE,VALUE,...")
    return full_key(key), found


def _predict(config: SimulationConfig, fit: Fit | None) -> Prediction:
    from train.simulation.prediction import predict
    from train.simulation.simulator import Simulation

    return predict(Simulation(config, fit.measured if fit and _as_measured(config, fit) else None).run())


def _as_measured(config: SimulationConfig, fit: Fit) -> bool:
    """Whether no distribution of the run was replaced by hand."""
    given = config.model_dump()
    keys = [(section, key) for section, names in MEASURED_KEYS.items() for key in names]
    return all(given[section][key] == fit.config[section][key] for section, key in keys)


def _save(path: Path, config: SimulationConfig) -> None:
    import yaml

    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True), sort_keys=False))
    os.replace(partial, path)


def _report(
    options: argparse.Namespace, fit: Fit | None, swept: str | None, values: list[str], predictions: list[Prediction]
) -> str:
    if options.json:
        rows = [prediction.as_dict() for prediction in predictions]
        if swept:
            rows = [{swept: value} | row for value, row in zip(values, rows, strict=True)]
        return json.dumps({"sweep": swept, "rows": rows} if swept else rows[0])
    if swept:
        return _swept_table(swept, values, predictions)
    return _table(predictions[0], fit)


def _table(prediction: Prediction, fit: Fit | None) -> str:
    rows = [("", "simulated", *(["the run was"] if fit else []))]
    for name, words, unit in FIGURES:
        row = (words, _shown(getattr(prediction, name), unit))
        rows.append((*row, _shown(fit.observed.get(name), unit)) if fit else row)
    lags = ", ".join(f"{lag}: {_shown(share, '%')}" for lag, share in prediction.staleness.items())
    dropped = ", ".join(f"{reason}: {count}" for reason, count in prediction.dropped.items()) or "none"
    deaths = ", ".join(f"{who}: {count}" for who, count in prediction.deaths.items())
    lines = [*_aligned(rows), "", f"staleness of trained groups  {lags}", f"groups dropped  {dropped}"]
    if deaths:
        lines.append(f"deaths  {deaths}")
    balance = "balances" if prediction.ledger["balanced"] else "DOES NOT BALANCE"
    lines += [
        f"{prediction.steps} steps; {prediction.hours:.2f} h with the warm-up; the ledger of "
        f"{prediction.ledger['dispatched']} episodes {balance}",
        f"what limits it: {prediction.limit}",
    ]
    return "\n".join(lines)


def _swept_table(key: str, values: list[str], predictions: list[Prediction]) -> str:
    shown = [(name, words, unit) for name, words, unit in FIGURES if name in SWEPT]
    rows = [(key.rpartition(".")[2], *(words for _, words, _ in shown), "limit")]
    for value, prediction in zip(values, predictions, strict=True):
        figures = (_shown(getattr(prediction, name), unit) for name, _, unit in shown)
        rows.append((value, *figures, prediction.limit.partition(":")[0]))
    return "\n".join(_aligned(rows))


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "%":
        return f"{100 * value:.1f} %"
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{digits} {unit}".rstrip()


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _described(model: Any, defaults: dict[str, Any] | None, prefix: str = "") -> list[str]:
    """A line for each key: name, default, meaning."""
    from train.config import section_of

    lines: list[str] = []
    for name, info in model.model_fields.items():
        default = None if defaults is None else defaults[name]
        meaning = f"  # {info.description}" if info.description else ""
        section = section_of(info)
        if section is None:
            lines.append(f"{prefix}{name}: {json.dumps(default)}{meaning}")
        else:
            lines += [*([meaning.strip()] if meaning else []), *_described(section, default, f"{prefix}{name}.")]
    return lines


def _complain(problem: object, code: int) -> int:
    print(f"fleet-rl: {' '.join(str(problem).split())}", file=sys.stderr)
    return code
