"""Wheels without a module: an installer needs no more than their metadata."""

import zipfile
from pathlib import Path

__all__ = ["make_wheel"]


def make_wheel(folder: Path, name: str, version: str) -> None:
    """Writes a distribution of this name into a folder."""
    info = f"{name}-{version}.dist-info"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"{info}/{file}", text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{info}/{file},,\n" for file in [*files, "RECORD"]))
