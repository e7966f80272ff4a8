"""A package of `examples/`, installed into an environment of its own."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

__all__ = ["environment_with"]


def environment_with(package: Path, folder: Path) -> str:
    """The Python of a new environment that has what this one has, and the package."""
    venv.create(folder, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    ours = sysconfig.get_paths()["purelib"]
    (site_packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    made = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", made, "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", str(package)], check=True)
    return made
