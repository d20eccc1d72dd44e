"""The dialogue is deterministic, carries the task's context, and grows by appending ids only."""

import json

import pytest

from actors.prompt import Prompter, PromptError, system_text, tool_message
from actors.task import Task
from tests.models import byte_tokenizer

TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}]
# The part of Qwen3's behaviour that breaks naive rendering: an empty thinking block appears in the last assistant turn
# and vanishes once another message follows.
THINKING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def task(**variables):
    return Task(task_key="t", prompt="Find it.", env_key="e", env_variables=variables)


def test_date_and_user_come_from_the_task():
    text = system_text(
        task(CURRENT_DATE="2025-01-30", LOGGED_IN_USER="u7", LOGGED_IN_NAME="Ana", TIER="gold"), [], "text"
    )
    assert "## Current Date\n2025-01-30" in text
    assert "Logged in user ID: u7" in text and "Logged in as: Ana" in text and "TIER: gold" in text
    assert text.index("Current Date") < text.index("Environment Context") < text.index("Available Tools")
    assert text.index("Available Tools") < text.index("Tool Call Format") < text.index("Error Handling")
    assert text.index("Error Handling") < text.index("Response Format")


def test_the_rules_whose_absence_broke_runs_are_in_the_prompt():
    text = system_text(task(), [], "text")
    assert "End every turn with exactly one tool call, or with <done>" in text
    assert "write the final answer first, then <done>" in text
    assert "Never repeat a call with the same arguments" in text
    assert "After an error, read it and change your approach" in text
    assert '<tool_call>{"name": "tool_name", "arguments": {"param": "value"}}</tool_call>' in text


def test_without_a_date_no_date_is_invented():
    assert "Date" not in system_text(task(), [], "text")


READS_CLOCK = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    'Today Date: {{ date_string }} ({{ strftime_now( "%A" ) }})\n'
)


@pytest.mark.parametrize(
    ("variables", "written"),
    [
        ({"CURRENT_DATE": "2025-01-30"}, "Today Date: 30 Jan 2025 (Thursday)\n"),
        ({"CURRENT_DATE": "2025-01-30T23:59:00+00:00"}, "Today Date: 30 Jan 2025 (Thursday)\n"),
        ({"CURRENT_DATE": 'the "30th"'}, 'Today Date: the "30th" (the "30th")\n'),
        ({}, "Today Date: 26 Jul 2024 (Friday)\n"),
    ],
)
def test_a_chat_template_that_reads_the_clock_is_given_the_tasks_date(variables, written):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = READS_CLOCK + tokenizer.chat_template
    prompter = Prompter(tokenizer)
    assert tokenizer.decode(prompter.first(task(**variables), TOOLS)[1]).startswith(written)
    without = byte_tokenizer()
    assert prompter.observation([tool_message("x")]) == Prompter(without).observation([tool_message("x")])


def test_a_chat_template_that_reads_the_clock_in_another_way_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% set f = '%d' %}{{ strftime_now(f) }}" + tokenizer.chat_template
    with pytest.raises(PromptError, match="reads the clock"):
        Prompter(tokenizer)


def test_tool_schemas_are_in_the_text_or_left_to_the_template():
    assert json.dumps(TOOLS, indent=2) in system_text(task(), TOOLS, "text")
    assert "look" not in system_text(task(), TOOLS, "template")


@pytest.mark.parametrize("template", [None, THINKING_TEMPLATE])
def test_observation_ids_continue_the_rendered_dialogue(template):
    tokenizer = byte_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    prompter = Prompter(tokenizer)
    messages, ids = prompter.first(task(), TOOLS)
    turn = {"role": "assistant", "content": "calling"}
    result = tool_message({"found": 1})
    ids = ids + prompter.encode("calling") + [tokenizer.eos_token_id] + prompter.observation([result])
    whole = tokenizer.apply_chat_template([*messages, turn, result], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == whole


def test_a_template_that_cannot_end_a_turn_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    with pytest.raises(PromptError, match="does not end an assistant turn"):
        Prompter(tokenizer)


def test_a_tokenizer_without_template_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(PromptError, match="no chat template"):
        Prompter(tokenizer)


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [({"a": [1]}, None, '{"a":[1]}'), ("plain", None, "plain"), (None, "no such id", "Error: no such id")],
)
def test_results_and_errors_are_written_as_tool_messages(content, error, text):
    assert tool_message(content, error) == {"role": "tool", "content": text}
