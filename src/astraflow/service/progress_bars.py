"""Keeps the progress bars of the Hugging Face libraries out of logs."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

__all__ = ["progress_bars_off"]


@contextmanager
def progress_bars_off() -> Generator[None]:
    """Turns off the bars of `datasets` and `transformers` within this context, unless stderr is a terminal.

    Import the library first. HF_DATASETS_DISABLE_PROGRESS_BARS=0 and HF_HUB_DISABLE_PROGRESS_BARS=0 keep the
    bars. Downloads from the hub show bars only in terminals anyway.
    """
    switches = [] if sys.stderr.isatty() else _switches()
    for turn_off, _ in switches:
        turn_off()
    try:
        yield
    finally:
        for _, turn_on in switches:
            turn_on()


def _switches() -> list[tuple[Callable[[], object], Callable[[], object]]]:
    """Returns the functions that turn bars off and on again, for each imported library whose bars may be
    turned off."""
    switches: list[tuple[Callable[[], object], Callable[[], object]]] = []
    datasets: Any = sys.modules.get("datasets")
    is_unset = datasets and datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS is None
    if is_unset and not datasets.are_progress_bars_disabled():
        switches.append((datasets.disable_progress_bars, datasets.enable_progress_bars))
    transformers: Any = sys.modules.get("transformers.utils.logging")
    hub: Any = sys.modules.get("huggingface_hub.constants")
    is_unset = transformers and hub.HF_HUB_DISABLE_PROGRESS_BARS is None
    if is_unset and transformers.is_progress_bar_enabled():
        switches.append((transformers.disable_progress_bar, transformers.enable_progress_bar))
    return switches
