"""The parser reads what the policy meant, and never raises."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.tool_calls import ToolCall, Turn, parse_turn

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@given(name=st.text(min_size=1), arguments=st.dictionaries(st.text(), JSON_VALUES, max_size=4))
def test_a_well_formed_call_is_read_back_exactly(name, arguments):
    text = "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"
    assert parse_turn(text) == Turn(calls=(ToolCall(name, arguments),))


@given(st.text() | st.text(alphabet='<>{}[]":,/ \\toolcalthinkd\n0129-e.', max_size=300))
def test_no_text_makes_the_parser_raise(text):
    turn = parse_turn("<tool_call>" + text)
    assert turn.error is None or turn.error
    assert parse_turn(text).answer == parse_turn(text).answer.strip()


def test_a_closing_tag_inside_a_string_is_not_the_end():
    text = '<tool_call>{"name": "say", "arguments": {"text": "a </tool_call> b <done>"}}</tool_call>'
    assert parse_turn(text) == Turn(calls=(ToolCall("say", {"text": "a </tool_call> b <done>"}),))


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_up_to_three_missing_closing_braces_are_repaired(missing):
    full = '{"name": "f", "arguments": {"a": {"b": 1}}}'
    text = f"<tool_call>{full[:-missing]}</tool_call>"
    assert parse_turn(text).calls == (ToolCall("f", {"a": {"b": 1}}),)


def test_a_missing_quote_is_not_repaired():
    turn = parse_turn('<tool_call>{"name": "f", "arguments": {"a": "b}}</tool_call>')
    assert turn.calls == () and "not a complete JSON object" in turn.error


@pytest.mark.parametrize(
    ("text", "done", "answer"),
    [
        ("42<done>", True, "42"),
        ("42 <DONE>", True, "42"),
        ("<think>shall I write <done>?</think>not yet", False, "not yet"),
        ("still thinking <done></think>4<done>", True, "4"),
        ("<think>never closed <done>", False, ""),
        ("plain text", False, "plain text"),
        ("- [done] step 1", False, "- [done] step 1"),
    ],
)
def test_done_counts_only_outside_thinking(text, done, answer):
    turn = parse_turn(text)
    assert (turn.done, turn.answer, turn.calls) == (done, answer, ())


def test_several_calls_are_returned_in_order():
    text = '<tool_call>{"name":"a"}</tool_call>\n<function_call>{"tool":"b","params":{"x":1}}</function_call>'
    assert parse_turn(text).calls == (ToolCall("a", {}), ToolCall("b", {"x": 1}))


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("[1]", "not a list"),
        ("7", "not a number"),
        ('{"arguments": {}}', "needs a string 'name'"),
        ('{"name": 3}', "needs a string 'name'"),
        ('{"name": "f", "arguments": "x"}', "not a string"),
        ('{"name": "f", "arguments": {"a": NaN}}', "not a complete JSON object"),
        ('{"name": "f", "arguments": {"a": -Infinity', "not a complete JSON object"),
        ('{"name": "f", "arguments": {"a": -1e999}}', "not a complete JSON object"),
        ("9" * 8000, "not a complete JSON object"),
        ("[" * 100_000, "not a complete JSON object"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(body, part):
    turn = parse_turn(f"<tool_call>{body}</tool_call>")
    assert part in turn.error and not turn.calls and not turn.done


def test_done_inside_a_call_that_cannot_be_read_is_not_a_done_signal():
    assert not parse_turn('<tool_call>{"name": "f", "arguments": {"a": "<done>').done
