"""The text of tokens, decoded with the tokenizer of their policy.

The tokenizer is searched for in the run folder (published versions include it, and rollout services keep a
copy), then in the model's folder. It is data, and none of it is executed. Without a tokenizer or the library
`tokenizers`, tokens are shown as ids.
"""

import contextlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from astraflow.errors import Error
from astraflow.recipe.run_folder import RunFolder
from astraflow.types import Manifest

__all__ = ["TokenText"]

_FILE = "tokenizer.json"
_MAX_PIECES = 100_000
_MAX_FILE_BYTES = 64 * 1024 * 1024


class TokenText:
    """Decodes the tokens of a run. Example: `TokenText(folder).pieces("actor", [5, 6])` is `["2", "+"]`."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._decoders: dict[str, _Decoder] = {}

    def pieces(self, policy: str, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token.

        A character that spans several tokens shows as a replacement character in each of them.
        """
        piece = self._decoder(policy).piece
        return [piece(token_id) for token_id in token_ids]

    def text(self, policy: str, token_ids: Sequence[int]) -> str:
        """Returns the text of all tokens together, including special tokens."""
        return self._decoder(policy).text(token_ids)

    def _decoder(self, policy: str) -> "_Decoder":
        if policy not in self._decoders:
            self._decoders[policy] = _Decoder(self._tokenizer(policy))
        return self._decoders[policy]

    def _tokenizer(self, policy: str) -> Any:
        """Loads the tokenizer of a policy; returns None if none can be read."""
        try:
            from tokenizers import Tokenizer
        except ImportError:
            return None
        for path in self._places(policy):
            # The library's errors derive directly from `Exception`.
            with contextlib.suppress(Exception):
                if path.stat().st_size <= _MAX_FILE_BYTES:
                    return Tokenizer.from_file(str(path))
        return None

    def _places(self, policy: str) -> list[Path]:
        """Returns the files that may contain the tokenizer.

        The policy's name comes from the journal, so it is used in paths only if the recipe has this policy.
        """
        model_dir: Path | None = None
        with contextlib.suppress(Error, OSError):
            config = self._folder.load_recipe().policies.get(policy)
            model_dir = config.model_dir if config is not None else None
        if model_dir is None:
            return []
        copies = sorted(self._folder.cache.glob(f"*/model-{policy}-*/{_FILE}"))
        published = self._folder.weights / policy
        for manifest_path in sorted((published / "manifests" / policy).glob("*.json")):
            with contextlib.suppress(msgspec.MsgspecError, OSError):
                manifest = msgspec.json.decode(manifest_path.read_bytes(), type=Manifest)
                copies += [published / "chunks" / f.chunk.hash for f in manifest.files if f.name == _FILE]
        return [*copies, model_dir / _FILE]


class _Decoder:
    """Decodes with one tokenizer, or shows ids if that is None."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.piece = lru_cache(_MAX_PIECES)(self._piece)
        """The text of one token. Only these are kept, since whole texts may be long."""

    def _piece(self, token_id: int) -> str:
        return self.text((token_id,))

    def text(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is not None:
            # The library's errors derive directly from `Exception`. An id may be unknown to the tokenizer.
            with contextlib.suppress(Exception):
                return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
        return "".join(f"\u27e8{token_id}\u27e9" for token_id in token_ids)
