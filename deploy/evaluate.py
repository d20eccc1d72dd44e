"""``fleet-rl eval``: pass rates of a checkpoint, a model or an endpoint, by the episodes of a run, without training.

Exit codes: 0 done, 1 it failed, or nothing was graded, or the endpoint or the upload failed, 2 wrong input (nothing was
started), 130 stopped by a signal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.argument_types import endpoint_url, positive, within

if TYPE_CHECKING:
    from rich.table import Table

    from actors.task import Task
    from train.checkpoint_eval import Evaluated, Policy
    from train.config import RunConfig
    from train.evaluator import Attempts

RESULT = "evaluation.json"
OUT = Path("evals")
CONCURRENCY = 8  # of an endpoint


def main(arguments: Sequence[str]) -> int:
    options, overrides = _parse(arguments)
    from train.config import ConfigError
    from train.failures import RunFailed, stoppable

    try:
        with stoppable():
            return _evaluate(options, overrides)
    except ConfigError as error:
        return _complain(error, 2)
    except (RunFailed, OSError) as error:
        return _complain(f"the evaluation failed: {error}", 1)
    except KeyboardInterrupt:
        return _complain("stopped", 130)


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="fleet-rl eval",
        description="Evaluate a checkpoint, a model or a chat endpoint, by the episodes of a run, without training.",
        epilog="Keys of the configuration can be overridden: --dotted.key value. The key of an endpoint is read from "
        "OPENAI_API_KEY.",
        allow_abbrev=False,
    )
    parser.add_argument("target", metavar="CONFIG|RUN", help="a .yaml file, a run's folder, or its name under runs/")
    parser.add_argument(
        "--checkpoint",
        metavar="DIR|latest|base",
        help="a checkpoint or a model folder, the run's latest checkpoint, or the model it starts from; default: "
        "latest for a RUN, base for a CONFIG",
    )
    parser.add_argument(
        "--split", default="eval", metavar="eval|train|FILE", help="a side of the run's tasks, or a task file"
    )
    parser.add_argument("--tasks", type=positive, metavar="N", help="at most N tasks of each environment")
    parser.add_argument("--samples", type=positive, metavar="K", help="attempts at a task; default: as in the run")
    parser.add_argument("--temperature", type=within(0, 2), metavar="T", help="default: as in the run; 0 is greedy")
    parser.add_argument("--greedy", action="store_true", help="temperature 0, one attempt at a task")
    parser.add_argument("--top-p", type=within(0, 1), metavar="P", help="default: as in the run")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="tokens of one turn; default: as in the run")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"gets global_step_N/ or eval_only/; default: {OUT}/NAME of the run, of an endpoint {OUT}/NAME-MODEL",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an evaluation that is there")
    parser.add_argument("--upload-to", metavar="S3", help="copies go to S3/evals/NAME/, in SkyRL's layout")
    parser.add_argument("--json", action="store_true", help="the last line of the output is the result as JSON")
    endpoint = parser.add_argument_group("a model behind an endpoint, in place of a checkpoint; nothing is loaded here")
    endpoint.add_argument(
        "--endpoint", type=endpoint_url, metavar="URL", help="an OpenAI-compatible endpoint, mostly ending in /v1"
    )
    endpoint.add_argument("--model", metavar="NAME", help="the model to ask for there")
    endpoint.add_argument(
        "--endpoint-tools",
        choices=("native", "text"),
        help="default: native; text: calls in <tool_call> tags, where the endpoint has no tool calling",
    )
    endpoint.add_argument(
        "--concurrency", type=positive, metavar="N", help=f"episodes, and instances, at once; default: {CONCURRENCY}"
    )
    options, overrides = parser.parse_known_args(arguments)
    if (options.endpoint is None) != (options.model is None):
        parser.error("--endpoint and --model belong together")
    if options.endpoint is None and (options.endpoint_tools or options.concurrency):
        parser.error("--endpoint-tools and --concurrency need --endpoint")
    if options.endpoint is not None and options.checkpoint is not None:
        parser.error("--endpoint and --checkpoint are two policies: leave one out")
    if options.greedy and options.temperature:
        parser.error(f"--greedy is temperature 0, and --temperature is {options.temperature:g}: leave one out")
    if options.top_p == 0:
        parser.error("argument --top-p: 0 leaves no token")
    return options, overrides


def _evaluate(options: argparse.Namespace, overrides: list[str]) -> int:
    began = time.monotonic()
    from train.run import keep_ray_private

    keep_ray_private()  # before anything below imports Ray
    from train import checkpoint_eval as job
    from train.config import ConfigError, known_keys
    from train.eval_upload import eval_prefix
    from train.evaluate import aggregate, attempts_of, dump_eval
    from train.preflight import check_store
    from train.s3 import StorageError

    for word in overrides:
        if word.startswith("--") and "." not in (key := word[2:].partition("=")[0]) and key not in known_keys():
            raise ConfigError(f"unknown option {word}; fleet-rl eval --help lists them")
    run, is_run = job.find_config(options.target, overrides)
    if options.endpoint is not None:
        policy = job.Policy(options.model, None)
        name = job.endpoint_name(run, options.model)
    else:
        policy = job.find_policy(run, options.checkpoint or (job.LATEST if is_run else job.BASE))
        name = run.name
    temperature = 0.0 if options.greedy else options.temperature
    attempts = job.choose_sampling(run, options.samples, temperature, options.top_p, options.max_tokens)
    out = options.out or OUT / name
    folder = job.result_folder(out, policy, attempts, options.overwrite)
    tasks = job.choose_tasks(run, options.split, options.tasks)
    if options.upload_to is not None:
        check_store(options.upload_to, "--upload-to")
    if options.endpoint is not None:
        done, attempts = _at_endpoint(options, run, tasks, attempts)
        tokenizer = None
    else:
        done, tokenizer = _by_checkpoint(run, policy, tasks, attempts)

    files = dump_eval(folder, done.groups, tokenizer)
    results = aggregate(attempts_of(done.groups))
    facts = {
        "run": run.name,
        "model": policy.path,
        "endpoint": None if done.spent is None else {"url": options.endpoint, **done.spent},
        "step": policy.step,
        "split": options.split,
        "tasks": len(tasks),
        "samples": attempts.n,
        "sampling": job.sampling_facts(attempts.sampling),
        **done.outcomes,
        "pass_at_1": results.get("eval/all/pass_at_1"),
        "results": results,
        "ledger": done.ledger,
        "sampled_tokens": done.sampled_tokens,
        "out": str(folder),
        "uploaded_to": None,
        "wall_s": round(time.monotonic() - began, 1),
    }
    problem = done.problem
    if problem is None and not done.outcomes["graded"]:
        problem = f"no attempt was graded: {_reasons(done)}"
    if options.upload_to is not None:
        location = eval_prefix(options.upload_to, name)
        try:
            job.upload_dump(files, out, location)
            facts["uploaded_to"] = location
        except StorageError as error:
            problem = f"{folder} is not uploaded: {error}"
    partial = folder / f".{RESULT}.partial"
    partial.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / RESULT)
    _show(facts, done)
    if options.json:
        print(json.dumps(facts), flush=True)
    return 0 if problem is None else _complain(problem, 1)


def _by_checkpoint(run: RunConfig, policy: Policy, tasks: list[Task], attempts: Attempts) -> tuple[Evaluated, Any]:
    """What became of the attempts, and the tokenizer of their ids."""
    from train import checkpoint_eval as job

    config, inputs = job.check(run, policy, tasks)
    with _progress(len(tasks) * attempts.n) as report:
        return job.evaluate(config, inputs, attempts, report), inputs.tokenizer


def _at_endpoint(
    options: argparse.Namespace, run: RunConfig, tasks: list[Task], attempts: Attempts
) -> tuple[Evaluated, Attempts]:
    """What became of the attempts, and how they were made."""
    from train import endpoint_eval as job
    from train.chat.protocol import KEY_VARIABLE

    config = job.check(run, tasks)
    attempts = replace(attempts, sampling=job.sampling_of(attempts.sampling))
    key = os.environ.get(KEY_VARIABLE)
    asked = job.Asked(
        options.endpoint, options.model, options.endpoint_tools or "native", key, options.concurrency or CONCURRENCY
    )
    with _progress(len(tasks) * attempts.n) as report:
        return job.evaluate(config, tasks, attempts, asked, report), attempts


@contextmanager
def _progress(attempts: int):
    """A bar on a terminal, elsewhere only what is waited for; on standard error, for programs read the output."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("starting", total=attempts)
        shown = ""

        def report(status: dict[str, Any]) -> None:
            nonlocal shown
            progress.update(bar, description=status.get("phase"), completed=status.get("ended"))
            phase = status.get("phase") or ""
            if not console.is_terminal and phase.startswith("waiting") and phase != shown:
                console.print(f"fleet-rl: {phase}", highlight=False, markup=False, soft_wrap=True)
                shown = phase

        yield report


def _show(facts: dict[str, Any], done: Evaluated) -> None:
    from rich.console import Console

    console = Console()
    console.print(_table(facts))
    left_out = {name: facts[name] for name in ("ungraded", "infra_failed", "cancelled") if facts[name]}
    if left_out:
        counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in left_out.items())
        console.print(f"not graded, and so counted nowhere: {counts} ({_reasons(done)})", highlight=False, markup=False)
    where = f" and in {facts['uploaded_to']}" if facts["uploaded_to"] else ""
    console.print(f"episodes and all numbers: {facts['out']}{where}", highlight=False, soft_wrap=True, markup=False)


def _reasons(done: Evaluated) -> str:
    return "; ".join(f"{count} x {reason}" for reason, count in sorted(done.reasons.items(), key=lambda r: -r[1])[:3])


def _table(facts: dict[str, Any]) -> Table:
    """A row for each environment and one for all, with Wilson's 95 % intervals. Fits 80 columns."""
    from rich.table import Table

    k, results, sampling = facts["samples"], facts["results"], facts["sampling"]
    title = f"{facts['model']}, {facts['split']}: {k} attempts a task at temperature {sampling['temperature']:g}"
    table = Table(title=title, title_justify="left")
    rates = {"pass@1": "pass_at_1"}
    if k > 1:
        rates |= {f"pass@{k}": f"pass_at_{k}", f"pass^{k}": f"pass_hat_{k}"}
    counts = {"tasks": "num_tasks", "graded": "num_samples"}
    if results["eval/all/not_graded"]:
        counts["left out"] = "not_graded"
    table.add_column("environment")
    for name in (*counts, *rates):
        table.add_column(name, justify="right")
    envs = sorted({name.split("/")[1] for name in results} - {"all"})
    for env in (*envs, "all"):
        value = {name.split("/")[2]: v for name, v in results.items() if name.split("/")[1] == env}
        cells = [str(value[name]) for name in counts.values()] + [_rate(value, name) for name in rates.values()]
        table.add_row(env, *cells, style="bold" if env == "all" else "", end_section=[env] == envs[-1:])
    return table


def _rate(value: dict[str, float], name: str) -> str:
    """In percent, with the interval where there is one."""
    if name not in value:
        return "–"
    low, high = value.get(f"{name}_low"), value.get(f"{name}_high")
    return f"{value[name]:.1%}" + (f" [{100 * low:.0f}, {100 * high:.0f}]" if low is not None else "")


def _complain(problem: object, code: int) -> int:
    print(f"fleet-rl: {' '.join(str(problem).split())}", file=sys.stderr)
    return code
