"""Tells what a Python has for a trainer. It runs this file itself, which needs only the standard library."""

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["python_report"]


def python_report() -> dict[str, Any]:
    """Returns AstraFlow's version and a digest of its source, both empty if it is missing, and whether there
    is megatron-core."""
    has_megatron = importlib.util.find_spec("megatron") is not None
    try:
        import astraflow
    except ImportError as err:
        return {"version": "", "source": "", "has_megatron": has_megatron, "problem": str(err)}
    folder = Path(astraflow.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return {
        "version": astraflow.__version__,
        "source": digest.hexdigest(),
        "has_megatron": has_megatron,
        "problem": "",
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(python_report()))
