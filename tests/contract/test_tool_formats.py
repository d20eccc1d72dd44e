"""Model families' own tool-call formats, read by vLLM's parsers."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.tool_calls import ToolCall, Turn, native_parser
from serve.engine import native_tool_calls
from tests.models import byte_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"room": {"type": "string"}, "hours": {"type": "integer"}},
                "required": ["room"],
            },
        },
    }
]
FORMATS = {
    "hermes": '<tool_call>\n{"name": "book", "arguments": {"room": "R1", "hours": 2}}\n</tool_call>',
    "llama3_json": '{"name": "book", "parameters": {"room": "R1", "hours": 2}}',
    "qwen3_coder": "<tool_call>\n<function=book>\n<parameter=room>\nR1\n</parameter>\n<parameter=hours>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm47": "<tool_call>book<arg_key>room</arg_key><arg_value>R1</arg_value><arg_key>hours</arg_key>"
    "<arg_value>2</arg_value></tool_call>",
}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = byte_tokenizer()
    tags = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|python_tag|>"]
    tokenizer.add_tokens(tags)
    return tokenizer


@pytest.mark.parametrize("name", FORMATS)
def test_a_familys_own_format_is_read_again_and_again(tokenizer, name):
    parse = native_parser(native_tool_calls(name, tokenizer)(json.dumps(TOOLS)))
    expected = (ToolCall("book", {"room": "R1", "hours": 2}),)
    for _ in range(3):
        assert parse("<think>which room?</think>" + FORMATS[name]).calls == expected
        turn = parse("All booked.<done>")
        assert (turn.calls, turn.done, turn.answer) == ((), True, "All booked.")


TAGS = ("tool_call", "function", "parameter", "arg_key", "arg_value")
PIECES = [f"<{tag}>" for tag in TAGS] + [f"</{tag}>" for tag in TAGS] + ["<function=book>", "<parameter=room>"]
PIECES += ['{"name": "book"', '"arguments": {', "}", "[", "9" * 5000, "book", "\n"]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=10).map("".join))
def test_whatever_the_policy_writes_is_read_or_refused_and_never_raises(tokenizer, name, text):
    turn = native_parser(native_tool_calls(name, tokenizer)(json.dumps(TOOLS)))(text)
    assert isinstance(turn, Turn) and (turn.error is None or turn.error)


def test_a_parser_that_breaks_is_an_error_for_the_policy_not_for_the_run():
    def broken(text):
        raise IndexError(text)

    assert native_parser(broken)("<tool_call>") == Turn(error="the tool call cannot be read (IndexError)")


def test_a_parser_that_does_not_exist_is_named(tokenizer):
    with pytest.raises(ValueError, match="tool_call_format 'hermess'"):
        native_tool_calls("hermess", tokenizer)
