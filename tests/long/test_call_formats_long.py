"""2,000 mutated texts of each family: no reader raises, calls another tool, or loses a call."""

import pytest

from drivers.call_templates import CALL_TEMPLATES, mutated_call_problems

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

MUTATED = 2_000


@pytest.mark.parametrize("name", CALL_TEMPLATES)
def test_no_mutated_text_of_thousands_raises_or_calls_another_tool(name: str) -> None:
    assert mutated_call_problems(CALL_TEMPLATES[name], num=MUTATED, seed=8) == []
