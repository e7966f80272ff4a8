from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.figures import intersection, total_s, union

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def points(intervals: list[tuple[float, float]]) -> set[int]:
    return {x for start, end in intervals for x in range(int(start), int(end))}


@given(spans)
def test_a_union_covers_the_same_times_once(raw: list[tuple[int, int]]) -> None:
    merged = union([(float(a), float(b)) for a, b in raw])
    assert points(merged) == points([(a, b) for a, b in raw])
    assert total_s(merged) == len(points(merged))
    assert all(start < end for start, end in merged)
    assert all(end < start for (_, end), (start, _) in pairwise(merged))


@given(spans, spans)
def test_an_intersection_is_the_times_in_both(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    first, second = union([(float(x), float(y)) for x, y in a]), union([(float(x), float(y)) for x, y in b])
    assert points(intersection(first, second)) == points(first) & points(second)


def test_an_overlap_worked_by_hand() -> None:
    generate = union([(0.0, 4.0), (3.0, 6.0), (8.0, 9.0)])
    assert generate == [(0.0, 6.0), (8.0, 9.0)]
    assert total_s(intersection(generate, [(5.0, 8.5)])) == 1.5
