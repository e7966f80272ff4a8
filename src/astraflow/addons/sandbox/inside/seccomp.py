"""Builds the filter of system calls in classic BPF: see seccomp(2) and `syscalls.py`.

The filter looks at the number of a call and at the low 32 bits of one argument. For most arguments that is
enough, because the kernel itself ignores their high bits.
"""

import errno
import os
import struct
from collections.abc import Iterable, Mapping

from astraflow.addons.sandbox.inside.syscalls import AGENTS, ALLOWED, JUDGED, PROCESSES, REFUSED, Numbers

__all__ = ["agent_filter", "filter_of", "is_known_machine"]

_MACHINES = ("x86_64", "aarch64")
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Instructions of classic BPF, and where `struct seccomp_data` has its fields.
_LOAD_WORD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_GREATER = 0x25
_JUMP_ANY_BIT = 0x45
_RETURN = 0x06
_OFFSET_NUMBER = 0
_OFFSET_ARCH = 4
_OFFSET_ARGUMENTS = 16

_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000

_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020000
"""All `CLONE_NEW...` flags of clone(2)."""
_MAP_SHARED = 0x01
_MAP_ANONYMOUS = 0x20
_PAGE_BYTES = 4096
_AF_UNIX = 1
_AF_INET = 2
_AF_INET6 = 10
_PROTOCOLS = (0, 6, 17)
"""The default protocol of a socket's type (0), TCP, and UDP."""
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS and TIOCGWINSZ, which tell Python whether a file is a terminal; FIONREAD, FIONBIO, FIONCLEX, and
FIOCLEX."""
_PRCTLS = (3, 15, 16, 0x53564D41)
"""PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, and PR_SET_VMA, with which glibc names memory."""
_AGENT_PRCTLS = (1, 2, 23, 36, 37, 38, 39)
"""PR_SET_PDEATHSIG, PR_GET_PDEATHSIG, PR_CAPBSET_READ, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER,
PR_SET_NO_NEW_PRIVS, and PR_GET_NO_NEW_PRIVS."""


def is_known_machine() -> bool:
    """Returns whether the numbers of this machine's system calls are known."""
    return os.uname().machine in _MACHINES


def filter_of(*, may_start_processes: bool) -> bytes:
    """Returns the filter for programs written by a model on this machine.

    It ends a program that makes a call that no solution of a task needs.
    """
    pairs = [*_answer_if(_AF_UNIX, _ALLOW), _instruction(_RETURN, _KILL)]
    judged = {
        "clone": (0, _clone_rules(may_start_processes=may_start_processes, otherwise=_KILL)),
        "mmap": (3, _mapping_rules()),
        "socketpair": (0, pairs),
        "ioctl": (1, _only(_IOCTLS, errno.ENOTTY)),
        "prctl": (0, _only(_PRCTLS, errno.EINVAL)),
    }
    allowed = {name: numbers for name, numbers in ALLOWED.items() if name not in judged}
    if may_start_processes:
        return _filter(allowed | PROCESSES, REFUSED, _KILL, judged)
    return _filter(allowed, REFUSED | PROCESSES, _KILL, judged)


def agent_filter() -> bytes:
    """Returns the filter for agent programs on this machine.

    Agent programs can be of any kind, and may try out what a machine supports. A refused call therefore fails
    instead of ending the program. Agent programs can use TCP, UDP, and pairs of Unix sockets, but no other
    Unix sockets.
    """
    allowed = ALLOWED | PROCESSES | AGENTS
    refused = {name: numbers for name, numbers in REFUSED.items() if name not in (*AGENTS, "socket")}
    judged = {
        "clone": (0, _clone_rules(may_start_processes=True, otherwise=_ERRNO | errno.EPERM)),
        "socket": (0, _socket_rules()),
        "socketpair": (0, _only((_AF_UNIX,), errno.EAFNOSUPPORT)),
        "ioctl": (1, _only(_IOCTLS, errno.ENOTTY)),
        "prctl": (0, _only((*_PRCTLS, *_AGENT_PRCTLS), errno.EINVAL)),
    }
    return _filter(allowed, refused, _ERRNO | errno.EPERM, judged)


def _filter(
    allowed: Mapping[str, Numbers],
    refused: Mapping[str, Numbers],
    refusal: int,
    judged: Mapping[str, tuple[int, list[bytes]]],
) -> bytes:
    """Returns a filter.

    `refusal`: the answer to refused calls. `judged`: for each call, the position of the argument that
    decides, and the rules for it.
    """
    machine = os.uname().machine
    column = _MACHINES.index(machine)

    def numbers(calls: Mapping[str, Numbers]) -> list[int]:
        column_numbers = [number[column] for number in calls.values()]
        return [number for number in column_numbers if number is not None]

    code = [
        # Calls of another architecture, such as 32-bit calls, have other numbers, so they end the program.
        _instruction(_LOAD_WORD, _OFFSET_ARCH),
        _instruction(_JUMP_EQUAL, _AUDIT_ARCH[machine], if_true=1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD_WORD, _OFFSET_NUMBER),
    ]
    for number in numbers(allowed):
        code += _answer_if(number, _ALLOW)
    for number in numbers(refused):
        code += _answer_if(number, refusal)
    for name, (idx, rules) in judged.items():
        (number,) = numbers({name: (ALLOWED | JUDGED | REFUSED)[name]})
        # The rules judge the low half of argument `idx`. They end with an answer.
        load = _instruction(_LOAD_WORD, _OFFSET_ARGUMENTS + 8 * idx)
        code += [_instruction(_JUMP_EQUAL, number, if_false=1 + len(rules)), load, *rules]
    # `clone3` is among the other calls. When it fails, glibc calls `clone`, whose flags a filter can see.
    code.append(_instruction(_RETURN, _ERRNO | errno.ENOSYS))
    return b"".join(code)


def _clone_rules(*, may_start_processes: bool, otherwise: int) -> list[bytes]:
    rules = [
        _instruction(_JUMP_ANY_BIT, _CLONE_NAMESPACES, if_false=1),
        _instruction(_RETURN, otherwise),
    ]
    if not may_start_processes:
        rules += [_instruction(_JUMP_ANY_BIT, _CLONE_THREAD, if_true=1), _instruction(_RETURN, otherwise)]
    return [*rules, _instruction(_RETURN, _ALLOW)]


def _mapping_rules() -> list[bytes]:
    """Refuses shared memory without a file, except for single pages: parts of it stay in use after they are
    unmapped, and no limit counts them."""
    refuse = _instruction(_RETURN, _ERRNO | errno.EPERM)
    return [
        _instruction(_JUMP_ANY_BIT, _MAP_ANONYMOUS, if_true=1),
        _instruction(_RETURN, _ALLOW),
        _instruction(_JUMP_ANY_BIT, _MAP_SHARED, if_true=1),
        _instruction(_RETURN, _ALLOW),
        _instruction(_LOAD_WORD, _OFFSET_ARGUMENTS + 8 * 1 + 4),  # the high half of the length
        _instruction(_JUMP_EQUAL, 0, if_true=1),
        refuse,
        _instruction(_LOAD_WORD, _OFFSET_ARGUMENTS + 8 * 1),
        _instruction(_JUMP_GREATER, _PAGE_BYTES, if_false=1),
        refuse,
        _instruction(_RETURN, _ALLOW),
    ]


def _socket_rules() -> list[bytes]:
    """Allows IPv4 and IPv6 with the usual protocols. For others, the kernel would load a module."""
    return [
        _instruction(_JUMP_EQUAL, _AF_INET, if_true=2),
        _instruction(_JUMP_EQUAL, _AF_INET6, if_true=1),
        _instruction(_RETURN, _ERRNO | errno.EAFNOSUPPORT),
        _instruction(_LOAD_WORD, _OFFSET_ARGUMENTS + 8 * 2),
        *_only(_PROTOCOLS, errno.EPROTONOSUPPORT),
    ]


def _only(values: Iterable[int], otherwise: int) -> list[bytes]:
    """Allows some values. Any other value makes the call fail with the error `otherwise`."""
    rules = [instruction for value in values for instruction in _answer_if(value, _ALLOW)]
    return [*rules, _instruction(_RETURN, _ERRNO | otherwise)]


def _answer_if(value: int, answer: int) -> list[bytes]:
    return [_instruction(_JUMP_EQUAL, value, if_false=1), _instruction(_RETURN, answer)]


def _instruction(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """Returns one instruction. The jumps are numbers of instructions to skip."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
