"""Stop texts and stop ids."""

from collections.abc import Sequence
from pathlib import Path

from astraflow.rollout.engines.requests import StopText, load_decoder, stop_ids
from drivers.engine_models import EOS, make_model_folder, make_random_model

LETTERS = "abcdefgh"


def decode(token_ids: Sequence[int]) -> str:
    return "".join(LETTERS[i] for i in token_ids)


def first_stop(texts: tuple[str, ...], text: str) -> int:
    """Tokens of `text` after which the watcher says stop, -1 if never."""
    watcher, ids = StopText(texts, decode), [LETTERS.index(c) for c in text]
    return next((n for n in range(1, len(ids) + 1) if watcher.is_reached(ids[:n])), -1)


def test_a_stop_text_is_seen_with_its_last_token() -> None:
    assert first_stop(("cd",), "abcabcdd") == 7
    assert first_stop(("h", "bc"), "abch") == 3
    assert first_stop(("aaa",), "aabaab") == -1


def test_only_the_tail_is_decoded() -> None:
    seen: list[int] = []

    def counting(token_ids: Sequence[int]) -> str:
        seen.append(len(token_ids))
        return decode(token_ids)

    StopText(("ab",), counting).is_reached([3] * 1000)
    assert seen == [12]


def test_a_model_stops_at_every_id_of_its_folder_that_it_has(tmp_path: Path) -> None:
    model = make_random_model()
    make_model_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 10000]}')
    assert stop_ids(model, tmp_path) == {4, EOS}
    assert stop_ids(model, tmp_path / "elsewhere") == frozenset()


def test_a_folder_decodes_with_its_own_tokenizer(tmp_path: Path) -> None:
    text = load_decoder(make_model_folder(tmp_path))
    assert text([2, 3, 4, 28, 38, 29]) == "abc0 1"
