"""Order and chance without a random state: both are hashes of a seed and a position.

An order is computed, not stored: a Feistel network permutes the next power of four above the number of items,
and positions that fall outside are walked on ("cycle walking"). A draw costs the same for ten items as for
ten billion, and what has to be remembered is a position.
"""

from collections.abc import Sequence

import xxhash

__all__ = ["chance", "permuted"]

_NUM_ROUNDS = 8
"""Four make a pseudorandom permutation of large domains; small ones mix better with more."""


def chance(*parts: object) -> float:
    """A number in `[0, 1)` that depends on nothing but `parts`, and is uniform over them."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode()) / 2**64


def permuted(position: int, *, size: int, seed: int, epoch: int) -> int:
    """Where `position` of `[0, size)` goes; for each seed and epoch this is a permutation of that range."""
    if not 0 <= position < size:
        raise IndexError(f"position {position} is outside of [0, {size})")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [xxhash.xxh3_64_intdigest(f"{seed}/{epoch}/{number}".encode()) for number in range(_NUM_ROUNDS)]
    value = _feistel(position, half_bits, keys)
    while value >= size:
        value = _feistel(value, half_bits, keys)
    return value


def _feistel(value: int, half_bits: int, keys: Sequence[int]) -> int:
    low_mask = (1 << half_bits) - 1
    left = value >> half_bits
    right = value & low_mask
    for key in keys:
        mixed = xxhash.xxh3_64_intdigest(right.to_bytes(8, "little"), seed=key)
        left, right = right, left ^ (mixed & low_mask)
    return (left << half_bits) | right
