"""Order and chance without a random state: both are hashes of a seed and a position.

An order is computed, not stored. A Feistel network permutes a domain whose size is the next power of four,
and is applied again to positions that fall outside of the items ("cycle walking"). So a draw costs the same
for ten items as for ten billion, and only a position has to be remembered.
"""

from collections.abc import Sequence

import xxhash

__all__ = ["chance", "permute"]

_NUM_ROUNDS = 8
"""Four rounds make a pseudorandom permutation of a large domain; small domains need more to mix well."""


def chance(*parts: object) -> float:
    """A number in `[0, 1)` that depends only on `parts`; uniform over different parts."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode()) / 2**64


def permute(position: int, *, size: int, seed: int, epoch: int) -> int:
    """Maps `position` to a position of `[0, size)`; this is a permutation for each seed and epoch."""
    if not 0 <= position < size:
        raise IndexError(f"position {position} is outside of [0, {size})")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [xxhash.xxh3_64_intdigest(f"{seed}/{epoch}/{number}".encode()) for number in range(_NUM_ROUNDS)]
    # Repeating a permutation leads back to `position`, which is in range, so this ends. It ends soon, because
    # the domain has at most 4 * size values.
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
