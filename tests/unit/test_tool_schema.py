"""Arguments are checked against a tool's schema, and whatever is wrong is said, never raised."""

import pytest

from actors.tool_schema import ToolSchemas


def problem(schema, value):
    tool = {"function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}}
    return ToolSchemas([tool]).problem("f", {"a": value})


@pytest.mark.parametrize("value", [10**400, -(10**4000)])
def test_a_number_too_large_to_compare_is_the_policys_to_mend(value):
    assert "too large" in problem({"type": "number", "multipleOf": 0.5}, value)


@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, {"$ref": "#/$defs/nowhere"}, {"type": "string", "pattern": r"\\p{L}(?<x>a)"}]
)
def test_a_schema_that_is_the_servers_mistake_does_not_stop_the_call(schema):
    assert problem(schema, "a") is None


def test_a_long_reason_is_cut():
    assert len(problem({"type": "integer"}, "x" * 10_000)) < 400
