"""The design system's rules that can be computed: contrasts, colors that color-blind people can tell apart,
and that nothing has a color of its own."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "web" / "src"
TOKENS = (SOURCES / "tokens.css").read_text(encoding="utf-8")
PAIRS = {
    name: (light, dark)
    for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", TOKENS)
}
SERIES = [f"series-{idx}" for idx in range(8)]
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
"""Linear RGB as people with this color blindness see it (Machado et al. 2009, severity 1)."""
THEMES = {"light": 0, "dark": 1}


def linear(color: str) -> np.ndarray:
    """Returns the linear RGB of `#rrggbb`."""
    values = np.array([int(color[idx : idx + 2], 16) for idx in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """Returns the contrast ratio of WCAG 2."""
    weights = np.array([0.2126, 0.7152, 0.0722])
    low, high = sorted(float(weights @ linear(each)) for each in (one, other))
    return (high + 0.05) / (low + 0.05)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Converts linear RGB to Oklab (Ottosson 2020), where distances are differences that people see."""
    to_lms = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    to_lab = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    return to_lab @ np.cbrt(to_lms @ np.clip(rgb, 0, 1))


def least_distance(colors: list[str], matrix: np.ndarray) -> float:
    """Returns the smallest distance of two of the colors, as seen through a color blindness."""
    seen = [oklab(matrix @ linear(color)) for color in colors]
    return min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))


@pytest.mark.parametrize("theme", THEMES)
def test_text_and_curves_have_contrast(theme: str) -> None:
    of = {name: pair[THEMES[theme]] for name, pair in PAIRS.items()}
    for back in ("page", "card", "inset"):
        assert contrast(of["text"], of[back]) >= 7
        for name in ("muted", "accent"):
            assert contrast(of[name], of[back]) >= 4.5, (name, back)
    for name in ("good", "warn", "bad"):
        for back in ("page", "card", f"{name}-soft"):
            assert contrast(of[name], of[back]) >= 4.5, (name, back)
    for name in SERIES:
        assert contrast(of[name], of["card"]) >= 3, name
    for name in (each for each in PAIRS if each.startswith("token-") and each != "token-text"):
        assert contrast(of["token-text"], of[name]) >= 4.5, name


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("blindness", BLINDNESS)
def test_color_blind_people_can_tell_curves_apart(theme: str, blindness: str) -> None:
    colors = [PAIRS[name][THEMES[theme]] for name in SERIES]
    assert least_distance(colors[:4], BLINDNESS[blindness]) >= 0.1
    assert least_distance(colors, BLINDNESS[blindness]) >= 0.05


def test_no_style_has_a_color_of_its_own() -> None:
    for name in (
        "base.css",
        "run.css",
        "episodes.css",
        "episode.css",
        "timeline.css",
        "groups.css",
        "plots.mplstyle",
    ):
        assert re.findall(r"#[0-9a-fA-F]{3,8}\b", (SOURCES / name).read_text(encoding="utf-8")) == [], name


def test_what_is_built_has_todays_tokens() -> None:
    assets = ROOT / "src" / "astraflow" / "addons" / "view" / "assets"
    plots = (ROOT / "src" / "astraflow" / "addons" / "plot" / "astraflow.mplstyle").read_text(
        encoding="utf-8"
    )
    for name, (light, _) in PAIRS.items():
        style = (assets / "app.css").read_text(encoding="utf-8").replace(" ", "")
        assert f"--{name}:light-dark({light}" in style
        if name in SERIES:
            assert light[1:] in plots
