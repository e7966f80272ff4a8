"""A folder that appears complete or not at all."""

from pathlib import Path

import pytest

from astraflow.user_input.new_folder import new_folder


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("failure", [OSError("full"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_folder_that_fails_on_the_way_leaves_nothing(
    tmp_path: Path, exists: bool, failure: BaseException
) -> None:
    out = tmp_path / "bundles" / "mine"
    out.parent.mkdir()
    if exists:
        out.mkdir()

    def fill() -> None:
        with new_folder(out) as fresh:
            (fresh / "models").mkdir()
            assert not exists or not any(out.iterdir())
            raise failure

    with pytest.raises(type(failure)):
        fill()
    assert list(out.parent.iterdir()) == ([out] if exists else [])
    assert not exists or not any(out.iterdir())


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_appears_when_it_is_complete_and_others_can_read_it(tmp_path: Path, exists: bool) -> None:
    out = tmp_path / "bundles" / "mine"
    if exists:
        out.mkdir(parents=True)
    with new_folder(out) as fresh:
        (fresh / "models").mkdir()
        (fresh.parent / "scratch").write_text("x")
    assert list(out.parent.iterdir()) == [out]
    assert [path.name for path in out.iterdir()] == ["models"]
    assert out.stat().st_mode & 0o777 == 0o755


def test_a_folder_with_content_is_replaced_only_on_request(tmp_path: Path) -> None:
    (tmp_path / "mine" / "old").mkdir(parents=True)

    def fill(*, replaces: bool) -> None:
        with new_folder(tmp_path / "mine", replaces=replaces) as fresh:
            (fresh / "new").mkdir()

    with pytest.raises(OSError, match="not empty"):
        fill(replaces=False)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "old"]
    fill(replaces=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "new"]
