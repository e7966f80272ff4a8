"""A sample that a rule sets to zero stays zero, whatever comes after."""

from drivers.zeroed_samples import check_many


def test_what_a_rule_sets_to_zero_stays_zero_and_takes_part_in_nothing() -> None:
    counts = check_many(300)
    assert min(counts["filter"], counts["credit"], counts[""]) > 20
