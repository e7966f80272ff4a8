"""The split of prompts into training and held-out ones."""

from astraflow.user_input.splits import is_heldout


def test_a_prompt_lies_on_the_same_side_on_every_machine() -> None:
    assert [is_heldout(f"Calculate {n} + 1.", frac=0.5) for n in range(8)] == [
        False, True, True, False, True, True, True, False,
    ]  # fmt: skip


def test_about_the_asked_share_is_held_out_and_a_larger_share_contains_it() -> None:
    prompts = [f"prompt {n}" for n in range(4000)]
    small = {p for p in prompts if is_heldout(p, frac=0.1)}
    large = {p for p in prompts if is_heldout(p, frac=0.3)}
    assert 0.08 < len(small) / len(prompts) < 0.12
    assert 0.27 < len(large) / len(prompts) < 0.33
    assert small < large


def test_a_share_of_nothing_holds_nothing_out() -> None:
    assert not any(is_heldout(str(n), frac=0.0) for n in range(100))
