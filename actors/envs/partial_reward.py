"""A reward between 0 and 1 from what a failed verifier printed, for tasks that check many things.

Verifiers of Fleet tasks print what they found wrong and right, and, where a task spans several applications, one
verdict each. Only a grade of exactly 0 is looked at: what a verifier granted stands.
"""

from __future__ import annotations

import ast
import re

_APP = re.compile(r"^App (\S+): (\d+)$", re.MULTILINE)
# An application on which the only thing that was right is that nothing was touched says nothing of the work.
UNTOUCHED = ("no unexpected changes", "no filesystem changes", "no-unexpected-envelopes")


def partial_reward(stdout: str) -> float | None:
    """The share of what was checked that was right; ``None`` where the output does not say.

    With one ``App NAME: N`` line for each application (N above 0: passed), the share of applications that passed; an
    application is left out if it passed only because nothing was touched, which the accumulators printed before its
    line tell. Else the share of successes in the ``SUCCESS_ACCUMULATOR`` and ``ERROR_ACCUMULATOR`` blocks, which hold
    Python lists.
    """
    apps = list(_APP.finditer(stdout))
    if not apps:
        right, wrong = _accumulated(stdout, "SUCCESS"), _accumulated(stdout, "ERROR")
        if right is None and wrong is None:
            return None
        good, bad = len(right or ()), len(wrong or ())
        return good / (good + bad) if good + bad else None
    passed, counted, position = 0, 0, 0
    for app in apps:
        section, position = stdout[position : app.start()], app.end()
        succeeded = int(app.group(2)) > 0
        if succeeded and _only_untouched(_accumulated(section, "SUCCESS")):
            continue
        counted += 1
        passed += succeeded
    return passed / counted if counted else None


def _only_untouched(successes: list[str] | None) -> bool:
    return bool(successes) and all(any(words in text.lower() for words in UNTOUCHED) for text in successes)


def _accumulated(text: str, kind: str) -> list[str] | None:
    """Entries of all blocks of a kind; ``None`` where there is no block that can be read."""
    blocks = re.findall(rf">>> {kind}_ACCUMULATOR >>>\s*(.*?)\s*<<< {kind}_ACCUMULATOR <<<", text, re.DOTALL)
    found: list[str] | None = None
    for block in blocks:
        try:
            entries = ast.literal_eval(block)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(entries, list | tuple):
            found = (found or []) + [str(entry) for entry in entries]
    return found
