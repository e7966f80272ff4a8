import errno
import os
from pathlib import Path

import pytest

from astraflow.addons.lending.audit import audit_lending
from astraflow.addons.lending.baton import Use
from astraflow.addons.lending.uses import (
    DeviceUse,
    UseBegin,
    UseLog,
    find_problems,
    read_uses,
    seconds_by_use,
)
from astraflow.errors import DataError


def make_use(
    begin_ns: int, end_ns: int, use: Use = "train", *, session_ns: int = 0, device: str = "actor"
) -> DeviceUse:
    return DeviceUse(
        device=device,
        session_ns=session_ns,
        use=use,
        begin_ns=begin_ns,
        end_ns=end_ns,
        why="a batch is ready",
    )


def test_uses_are_read_back_and_add_up(tmp_path: Path) -> None:
    path = tmp_path / "lending.jsonl"
    uses = [make_use(0, 10), make_use(10, 14, "switch"), make_use(14, 40, "generate")]
    log = UseLog(path)
    for use in uses:
        log.add(use)
    log.close()
    assert read_uses(path) == uses
    assert seconds_by_use(uses) == {"generate": 26e-9, "train": 10e-9, "switch": 4e-9, "idle": 0.0}
    lines, problems = audit_lending(tmp_path)
    assert not problems
    assert lines == ["device of actor: 0.000 s = generate 0.000 + train 0.000 + switch 0.000 + idle 0.000"]


@pytest.mark.parametrize("num_cut", [1, 2, 30, 90])
def test_a_crash_in_mid_line_leaves_the_lines_before_it(tmp_path: Path, num_cut: int) -> None:
    path = tmp_path / "lending.jsonl"
    log = UseLog(path)
    log.add(make_use(0, 10))
    log.add(make_use(10, 20, "idle"))
    log.close()
    os.truncate(path, path.stat().st_size - num_cut)
    assert read_uses(path) == [make_use(0, 10)]
    again = UseLog(path)
    assert again.end_ns == 10
    again.add(make_use(30, 40, session_ns=30))
    again.close()
    assert read_uses(path) == [make_use(0, 10), make_use(30, 40, session_ns=30)]
    assert find_problems(read_uses(tmp_path / "lending.jsonl")) == []


def test_a_use_without_an_end_ends_at_the_last_time_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lending.jsonl"
    log = UseLog(path)
    log.begin(UseBegin(device="actor", session_ns=0, use="train", begin_ns=0))
    log.begin(UseBegin(device="critic", session_ns=0, use="idle", begin_ns=0))
    log.add(make_use(0, 10, device="critic"))
    log.begin(UseBegin(device="critic", session_ns=0, use="idle", begin_ns=10))
    log.close()
    assert read_uses(path) == [make_use(0, 10, device="critic")]
    again = UseLog(path)
    again.close()
    ended = [
        (use.device, use.use, use.begin_ns, use.end_ns) for use in read_uses(path) if not use.is_end_known
    ]
    assert ended == [("actor", "train", 0, 10), ("critic", "idle", 10, 10)]
    UseLog(path).close()
    assert len(read_uses(path)) == 3, "they end once"


def test_a_line_that_cannot_be_written_is_written_with_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "lending.jsonl"
    full = [True]

    def write(fd: int, data: bytes, offset: int) -> int:
        if full:
            full.pop()
            os.pwrite(fd, data[:20], offset)
            raise OSError(errno.ENOSPC, "no space left on device")
        return os.pwrite(fd, data, offset)

    log = UseLog(path, write=write)
    log.add(make_use(0, 10))
    assert read_uses(path) == []
    log.add(make_use(10, 20, "idle"))
    log.close()
    assert read_uses(path) == [make_use(0, 10), make_use(10, 20, "idle")]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "lending.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="line 1 is not the use of a device"):
        read_uses(tmp_path / "lending.jsonl")
    lines, problems = audit_lending(tmp_path)
    assert "warning: " in lines[0]
    assert "line 1" in lines[0]
    assert problems == ()


@pytest.mark.parametrize(
    "uses",
    [
        [make_use(0, 10), make_use(11, 20, "idle")],
        [make_use(0, 10), make_use(9, 20, "idle")],
        [make_use(5, 10)],
        [make_use(0, 10), make_use(9, 20, session_ns=9)],
        [make_use(0, 10), make_use(10, 8)],
    ],
    ids=["gap", "overlap", "late begin", "sessions overlap", "backward"],
)
def test_a_second_without_exactly_one_use_is_a_problem(uses: list[DeviceUse]) -> None:
    assert len(find_problems(uses)) == 1


def test_devices_and_sessions_are_apart() -> None:
    first = [
        make_use(0, 10),
        make_use(0, 5, device="critic"),
        make_use(10, 20),
        make_use(5, 9, device="critic"),
    ]
    assert find_problems([*first, make_use(50, 60, session_ns=50)]) == []
