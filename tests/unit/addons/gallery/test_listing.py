"""What lists say about recipes."""

import pytest

from astraflow.addons.gallery.listing import about, full_recipes, listed_name, place_of
from astraflow.recipe import gallery

ENTRIES = gallery.entries()


@pytest.mark.parametrize("entry", [*ENTRIES, *full_recipes()], ids=lambda entry: entry.name)
def test_every_entry_says_what_it_is(entry: gallery.GalleryItem) -> None:
    assert len(about(entry)) > 20


def test_the_place_of_an_entry_is_its_path_below_the_root() -> None:
    assert [gallery.gallery_root() / place_of(entry) for entry in ENTRIES] == [
        entry.path for entry in ENTRIES
    ]


def test_a_family_is_listed_by_what_users_type() -> None:
    names = [listed_name(entry) for entry in ENTRIES]
    assert {"math/SIZE", "code-multi-agent/SIZE-select", "sizes/8b", "math/tiny"} < set(names)
