"""The filter of system calls, run by an interpreter of classic BPF."""

import errno
import platform
import struct

import pytest

from astraflow.addons.sandbox.inside import seccomp, syscalls

ALLOW = 0x7FFF0000
KILL = 0x80000000
ERRNO = 0x00050000
ENOSYS = ERRNO | errno.ENOSYS
MACHINE = platform.machine()

pytestmark = pytest.mark.skipif(not seccomp.is_known_machine(), reason=f"no filter for {MACHINE}")


def answer(
    name_or_number: str | int,
    *arguments: int,
    may: bool = False,
    arch: int | None = None,
    is_agent: bool = False,
) -> int:
    """What the kernel would do with a call."""
    table = syscalls.ALLOWED | syscalls.REFUSED | syscalls.PROCESSES | syscalls.JUDGED | syscalls.AGENTS
    column = ("x86_64", "aarch64").index(MACHINE)
    number = table[name_or_number][column] if isinstance(name_or_number, str) else name_or_number
    own = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[MACHINE]
    given = (*arguments, *[0] * 6)[:6]
    data = struct.pack("=iIQ6Q", number, own if arch is None else arch, 0, *given)
    code = seccomp.agent_filter() if is_agent else seccomp.filter_of(may_start_processes=may)
    return run_bpf(code, data)


def run_bpf(code: bytes, data: bytes) -> int:
    instructions = list(struct.iter_unpack("=HBBI", code))
    position = 0
    accumulator = 0
    while True:
        operation, if_true, if_false, value = instructions[position]
        position += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, value)
            case 0x15:
                position += if_true if accumulator == value else if_false
            case 0x45:
                position += if_true if accumulator & value else if_false
            case _:
                assert operation == 0x06
                return value


def test_what_python_needs_is_allowed() -> None:
    assert {answer(name) for name, numbers in syscalls.ALLOWED.items() if numbers[MACHINE != "x86_64"]} == {
        ALLOW
    }


def test_what_nothing_needs_ends_the_program() -> None:
    assert {answer(name) for name, numbers in syscalls.REFUSED.items() if numbers[MACHINE != "x86_64"]} == {
        KILL
    }


def test_unknown_calls_do_not_exist() -> None:
    assert answer(999) == ENOSYS
    assert answer(435) == ENOSYS  # clone3
    assert answer(0x40000000 + 1) == ENOSYS  # numbers of the x32 interface


def test_calls_of_another_architecture_end_the_program() -> None:
    assert answer("read", arch=0x40000003) == KILL


def test_threads_are_allowed_and_processes_only_where_they_may_be_started() -> None:
    thread = 0x3D0F00
    assert answer("clone", thread) == ALLOW
    assert answer("clone", 17) == KILL
    assert answer("execve") == KILL
    assert answer("clone", 17, may=True) == ALLOW
    assert answer("execve", may=True) == ALLOW


@pytest.mark.parametrize("may", [False, True])
def test_no_clone_makes_a_namespace(may: bool) -> None:
    for bit in (17, 25, 26, 27, 28, 29, 30):
        assert answer("clone", 0x10000 | 1 << bit, may=may) == KILL


def test_pairs_of_local_sockets_are_all_that_is_left_of_the_network() -> None:
    assert answer("socketpair", 1) == ALLOW
    assert answer("socketpair", 2) == KILL
    assert answer("socketpair", 16) == KILL


def test_only_harmless_requests_to_devices_and_processes_are_made() -> None:
    assert answer("ioctl", 0, 0x5401) == ALLOW
    assert answer("ioctl", 0, 0x5412) == 0x00050000 | 25
    assert answer("prctl", 15) == ALLOW
    assert answer("prctl", 4, 1) == 0x00050000 | 22


# --- agent programs -------------------------------------------------------------------------------


def test_agents_may_do_what_programs_of_any_kind_need() -> None:
    tables = syscalls.ALLOWED | syscalls.PROCESSES | syscalls.AGENTS
    names = [name for name, numbers in tables.items() if numbers[MACHINE != "x86_64"] is not None]
    assert {answer(name, is_agent=True) for name in names} == {ALLOW}
    assert answer("clone", 17, is_agent=True) == ALLOW


def test_what_is_refused_to_agents_fails_and_ends_nothing() -> None:
    denied = set(syscalls.REFUSED) - set(syscalls.AGENTS) - {"socket"}
    names = [name for name in denied if syscalls.REFUSED[name][MACHINE != "x86_64"] is not None]
    assert {"ptrace", "mount", "unshare", "bpf", "io_uring_setup"} <= set(names)
    assert {answer(name, is_agent=True) for name in names} == {ERRNO | errno.EPERM}
    assert answer("clone", 17 | 1 << 28, is_agent=True) == ERRNO | errno.EPERM
    assert answer(999, is_agent=True) == ENOSYS
    assert answer("read", is_agent=True, arch=0x40000003) == KILL


def test_agents_have_tcp_and_udp_and_of_unix_sockets_only_pairs() -> None:
    inet, inet6, unix, netlink, packet = 2, 10, 1, 16, 17
    for family in (inet, inet6):
        assert {answer("socket", family, 1, protocol, is_agent=True) for protocol in (0, 6, 17)} == {ALLOW}
        assert answer("socket", family, 1, 132, is_agent=True) == ERRNO | errno.EPROTONOSUPPORT
    for family in (unix, netlink, packet):
        assert answer("socket", family, 1, 0, is_agent=True) == ERRNO | errno.EAFNOSUPPORT
    assert answer("socketpair", unix, is_agent=True) == ALLOW
    assert answer("socketpair", inet, is_agent=True) == ERRNO | errno.EAFNOSUPPORT
    assert answer("prctl", 36, 1, is_agent=True) == ALLOW
    assert answer("prctl", 22, 2, is_agent=True) == ERRNO | errno.EINVAL


def test_no_call_has_two_numbers_or_two_tables() -> None:
    assert not set(syscalls.AGENTS) & set(syscalls.ALLOWED | syscalls.PROCESSES | syscalls.JUDGED)
    for column in (0, 1):
        everything = (
            syscalls.ALLOWED | syscalls.PROCESSES | syscalls.JUDGED | syscalls.REFUSED | syscalls.AGENTS
        )
        numbers = [each[column] for each in everything.values() if each[column] is not None]
        assert len(numbers) == len(set(numbers))
