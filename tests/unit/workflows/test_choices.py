import pytest

from astraflow.workflows.roles import last_choice


@pytest.mark.parametrize(
    ("text", "choices", "chosen"),
    [
        ("No... wait, it is right: YES.", ("yes", "no"), "yes"),
        ("I know nothing, eyes closed", ("yes", "no"), ""),
        ("378+937=1315=y", ("=y", "=n"), "=y"),
        ("10", ("1", "10"), "10"),
        ("1, then 10", ("1", "10"), "10"),
        ("very large", ("large", "very large"), "very large"),
        ("", ("yes", "no"), ""),
        ("yes", (), ""),
    ],
)
def test_the_last_choice_named_counts(text: str, choices: tuple[str, ...], chosen: str) -> None:
    assert last_choice(text, choices) == chosen
