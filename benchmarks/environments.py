"""Makes virtual environments for the systems that benchmarks compare with, because their dependencies differ
from ours.

Torch is chosen as by `make`, so `TORCH` in the process's environment may change it. Everything else that
`constraints.txt` names has the version there.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["make_environment"]

ROOT = Path(__file__).resolve().parent.parent


def make_environment(venv: Path, packages: Sequence[str]) -> Path:
    """Makes a virtual environment with torch and these packages if it is missing or was made of others.

    AstraFlow is installed there too, but without its dependencies: a reward is found by its entry point.

    Returns its interpreter, and prints the versions of the packages in it.
    """
    torch = os.environ.get("TORCH", "")
    python = venv / "bin" / "python"
    ready = venv / "ready"
    wanted = "\n".join([torch, *packages])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    if not ready.is_file() or ready.read_text() != wanted:
        print(f"making {venv} (about 2 minutes)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        (venv / ".gitignore").write_text("*\n")
        subprocess.run([str(python), str(ROOT / "tools" / "install_torch.py"), torch], check=True)
        install = [*pip, "install", "--quiet", "-c", str(ROOT / "constraints.txt"), *packages]
        subprocess.run(install, check=True)
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "--editable", str(ROOT)], check=True)
        ready.write_text(wanted)
    listed = subprocess.run([*pip, "list", "--format=freeze"], check=True, capture_output=True, text=True)
    names = {"torch", *(package.partition("==")[0].lower() for package in packages)}
    shown = [line for line in listed.stdout.splitlines() if line.partition("==")[0].lower() in names]
    print(f"{venv.name}:", ", ".join(shown), flush=True)
    return python
