"""Decides by their prompts alone which tasks are held out.

Different seeds do not keep training and evaluation apart. A small problem space repeats itself, and some
generators derive task `i` from `seed + i`, so neighboring seeds share nearly all tasks. A hash of the prompt
keeps them apart: equal prompts are always on the same side, whatever generates them. Task sources and the
demonstrations of a warm start use the same rule.
"""

import hashlib

__all__ = ["is_heldout"]

_BUCKETS = 1000
"""Shares of held-out tasks are rounded to a thousandth."""


def is_heldout(prompt: str, *, frac: float) -> bool:
    """Returns true for about `frac` of all prompts: those with `hash(prompt) mod 1000 < 1000 * frac`.

    The hash is an 8-byte BLAKE2b of the prompt in UTF-8, read as a little-endian number. It is the same on
    every machine.
    """
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _BUCKETS < round(_BUCKETS * frac)
