"""Task files that are broken in two hundred ways, for the commands that read one."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from actors.task import Task


def task(key: str, env: str = "github", **fields: Any) -> dict[str, Any]:
    return {"task_key": key, "prompt": f"Do {key}.", "env_key": env} | fields


GOOD = [
    task("a", env_version="v1", env_variables={"CURRENT_DATE": "2026-01-01"}, verifier_code="x", difficulty=1),
    task("b", task_modality="tool_use", data_key="k", data_version="v"),
    *(task(f"t{i}") for i in range(20)),
]
JUNK = [7, 1.5, True, "", [], ["x"], {}, {"x": 1}, "ü", 10**30]
FIELDS = [field for field in Task.model_fields]
TEXT_OR_NULL = {"env_version", "data_key", "data_version", "verifier_code"}


def is_wrong(field: str, value: Any) -> bool:
    """By Fleet's format, said once more: which values a field may not have."""
    if field in ("task_key", "prompt", "env_key", "openenv_answer_tool"):
        return not isinstance(value, str) or not value
    if field in TEXT_OR_NULL:
        return not isinstance(value, str)
    if field == "difficulty":
        return not isinstance(value, int) or value == 10**30
    if field == "task_modality":
        return value not in ("tool_use", "computer_use", "browser_use")
    return not isinstance(value, dict)


def broken_task_files() -> Iterator[tuple[str, bytes, list[str]]]:
    """A name, the file's bytes, and what the one line about it must say."""
    good = json.dumps(GOOD, indent=1).encode()
    rng = random.Random(11)
    for cut in sorted(rng.sample(range(len(good) - 1), 50)):
        yield f"cut-{cut}", good[:cut], ["not valid JSON", "line"]
    marks = [i for i, byte in enumerate(good) if byte in b'{}[]:"']
    for mark in rng.sample(marks, 40):
        yield f"without-byte-{mark}", good[:mark] + good[mark + 1 :], []
    for field in FIELDS:
        for value in JUNK:
            if is_wrong(field, value):
                content = json.dumps([GOOD[0], GOOD[1] | {field: value}, *GOOD[2:]]).encode()
                yield f"{field}-{value!r:.12}", content, ["task 1", f"'{field}"]
    for field in ("task_key", "prompt", "env_key"):
        for how in ("left out", "null"):
            changed = {k: v for k, v in GOOD[1].items() if k != field} | ({field: None} if how == "null" else {})
            yield f"{field}-{how}", json.dumps([GOOD[0], changed]).encode(), ["task 1", f"'{field}'", "required"]
    for value in (None, 1, "text", True, [], [GOOD[0]]):
        yield f"task-is-{value!r:.8}", json.dumps([*GOOD, value]).encode(), ["task 22", "JSON object"]
    for content in (b"", b" \n", b"null", b"3", b'"x"', b"{}", b'{"task": []}', b'{"tasks": {}}', b'{"tasks": null}'):
        yield f"whole-{content!r}", content, ["tasks.json"]
    for content in (b"[]", b'{"tasks": []}'):
        yield f"empty-{content!r}", content, ["no task is left", "the file holds none"]
    yield "utf-16", good.decode().encode("utf-16"), ["not valid JSON"]
    yield "byte-order-mark", b"\xef\xbb\xbf" + good, ["not valid JSON", "line 1"]
    yield "latin-1", good.replace(b"Do a.", b"Do \xe4."), ["task 0", "not valid JSON"]
    yield "nul", good.replace(b"Do a.", b"Do \x00."), ["not valid JSON"]
    yield "lone-surrogate", good.replace(b"Do b.", b"Do \\ud800."), ["not valid JSON"]
    yield "nan", good.replace(b'"difficulty": 1', b'"difficulty": NaN'), ["not valid JSON", "line 11"]
    yield "too-large-a-number", good.replace(b'"difficulty": 1', b'"x": 1e999'), ["task 0", "not valid JSON"]
    yield "single-quotes", good.replace(b'"', b"'"), ["not valid JSON", "line 3"]
    yield "deep", b"[" * 100_000, ["not valid JSON"]
    yield "deep-in-a-task", b'[{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}]", ["not valid JSON"]
    yield "two-documents", good + good, ["not valid JSON"]
    yield "json-lines", b"\n".join(json.dumps(t).encode() for t in GOOD), ["expected a list of tasks"]
    yield "binary", bytes(range(256)) * 10, ["not valid JSON"]
    yield "parquet", b"PAR1" + bytes(100) + b"PAR1", ["not valid JSON"]
