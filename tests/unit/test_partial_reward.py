"""Partial rewards from what a verifier printed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.envs.fleet import Verification, read_grade
from actors.envs.partial_reward import partial_reward
from actors.trajectory import Graded


def block(kind, entries):
    return f">>> {kind}_ACCUMULATOR >>>\n{entries!r}\n<<< {kind}_ACCUMULATOR <<<\n"


BOTH = block("ERROR", ["wrong date"]) + block("SUCCESS", ["booked", "right room", "mail sent"])


@pytest.mark.parametrize(
    ("stdout", "expected"),
    [
        (BOTH, 0.75),
        (block("ERROR", ["a", "b"]), 0.0),
        (block("ERROR", []) + block("SUCCESS", []), None),
        ("nothing of the kind", None),
        ("App mail: 1\nApp booking: 0\nApp drive: 0\n", 1 / 3),
        (
            block("SUCCESS", ["No unexpected changes"]) + "App mail: 1\n" + block("ERROR", ["x"]) + "App booking: 0\n"
            "App drive: 1\n",
            0.5,
        ),
        (block("SUCCESS", ["No filesystem changes"]) + "App drive: 1\n", None),
        (">>> ERROR_ACCUMULATOR >>>\n[not python\n<<< ERROR_ACCUMULATOR <<<", None),
        (">>> SUCCESS_ACCUMULATOR >>>\n__import__('os')\n<<< SUCCESS_ACCUMULATOR <<<", None),
    ],
)
def test_the_share_that_was_right(stdout, expected):
    assert partial_reward(stdout) == (None if expected is None else pytest.approx(expected))


@given(st.text(alphabet=st.sampled_from("><[]'\"AEUS_ \nCOR")) | st.text())
def test_no_output_makes_it_raise_or_leave_the_unit_interval(text):
    value = partial_reward(">>> ERROR_ACCUMULATOR >>>" + text)
    assert value is None or 0 <= value <= 1


def verification(result, stdout=BOTH):
    return Verification(success=True, result=result, stdout=stdout, error=None, execution_id=None)


def test_only_a_grade_of_zero_is_looked_at_and_only_if_asked_for():
    assert read_grade(verification(0.0), partial=True) == Graded(0.75)
    assert read_grade(verification(0.0)) == Graded(0.0)
    assert read_grade(verification(0.25), partial=True) == Graded(0.25)
    assert read_grade(verification(0.0, "silence"), partial=True) == Graded(0.0)
