from astraflow.rollout.policy_host import WeightSlots


def make_slots(live: int, pinned: int = -1, wanted: tuple[int, ...] = ()) -> WeightSlots:
    slots = WeightSlots()
    slots.finish_swap("live", live)
    if pinned >= 0:
        slots.finish_swap("pinned", pinned)
    slots.want(wanted)
    return slots


def test_nothing_is_offered_before_the_first_version() -> None:
    assert WeightSlots().offered_versions() == ()


def test_live_and_wanted_pinned_versions_are_offered_newest_last() -> None:
    assert make_slots(7, 4, (4,)).offered_versions() == (4, 7)


def test_a_pinned_version_is_not_offered_before_the_live_slot_has_it_too() -> None:
    slots = make_slots(7, 8, (8,))
    assert slots.offered_versions() == (7,)
    slots.retire_live()
    assert slots.offered_versions() == ()
    slots.finish_swap("live", 8)
    assert slots.offered_versions() == (8,)


def test_a_pinned_version_that_nobody_wants_is_not_offered() -> None:
    assert make_slots(7, 4).offered_versions() == (7,)


def test_the_oldest_wanted_version_is_pinned_first_and_stays_until_it_is_done() -> None:
    slots = make_slots(7, wanted=(6, 4))
    assert slots.next_pinned() == 4
    slots.finish_swap("pinned", 4)
    assert slots.next_pinned() == -1
    slots.want((6,))
    assert slots.next_pinned() == 6


def test_a_held_pinned_version_is_not_swapped() -> None:
    slots = make_slots(7, 4, (4,))
    assert slots.hold(4)
    slots.want((6,))
    assert slots.next_pinned() == -1
    slots.release(4)
    assert slots.next_pinned() == 6


def test_the_live_version_may_go_while_the_pinned_slot_has_it_too() -> None:
    slots = make_slots(7, 7, (7,))
    assert slots.hold(7)
    assert not slots.is_held("live")


def test_a_held_live_version_waits_and_is_offered_no_more() -> None:
    slots = make_slots(7, 4, (4, 7))
    assert slots.hold(7)
    assert slots.is_held("live")
    slots.retire_live()
    assert slots.offered_versions() == (4,)
    assert slots.hold(7)
    slots.release(7)
    slots.release(7)
    assert not slots.is_held("live")


def test_a_version_that_is_not_here_or_about_to_go_cannot_be_held() -> None:
    slots = make_slots(7)
    assert not slots.hold(6)
    slots.begin_swap("live")
    assert not slots.hold(7)
    slots.keep_live()
    assert slots.hold(7)
