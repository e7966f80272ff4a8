"""Which tasks are held out, decided by the prompt alone.

Different seeds do not keep training and evaluation apart: a small problem space repeats itself, and some
generators derive task `i` from `seed + i`, so that neighboring seeds share nearly all tasks. A hash of the
prompt does: whatever generates it, a prompt always stays on one side. Task sources and the demonstrations of
a warm start use the same rule.
"""

import hashlib

__all__ = ["is_heldout"]

_BUCKETS = 1000
"""Shares of held-out tasks are resolved to a thousandth."""


def is_heldout(prompt: str, *, frac: float) -> bool:
    """True for about `frac` of all prompts: iff `hash(prompt) mod 1000 < 1000 * frac`.

    The hash is 8 bytes of BLAKE2b over the prompt in UTF-8, little-endian: the same on every machine.
    """
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _BUCKETS < round(_BUCKETS * frac)
