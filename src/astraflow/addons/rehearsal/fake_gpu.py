"""Lets a process compute shapes and memory as on a GPU: torch's fake tensors on `cuda:0`, without a driver.

In builds of torch for CUDA, fake tensors suffice. A CPU build also needs a small library, which is compiled
once and loaded before torch.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from astraflow.errors import ConfigError

__all__ = ["build_library", "fake_gpu", "library_for_fakes"]

_SOURCE = Path(__file__).with_name("device.cpp")
_CACHE = Path("~/.cache/astraflow/fake_gpu")


def build_library(source: Path, folder: Path, *flags: str) -> Path:
    """Compiles a C++ file against the installed torch, once per source and torch.

    Raises: ConfigError if there is no compiler, or it fails.
    """
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    stamp = f"{torch} {(torch / 'version.py').read_text()}".encode() + source.read_bytes()
    library = folder / f"{source.stem}-{hashlib.sha256(stamp).hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        raise ConfigError("there is no C++ compiler (c++): install one, e.g. `apt install g++`, or set CXX")
    folder.mkdir(parents=True, exist_ok=True)
    partial_file = library.with_suffix(f".{os.getpid()}")
    argv = [compiler, "-shared", "-fPIC", "-std=c++20", "-w", *flags, str(source)]
    argv += [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    argv += [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    done = subprocess.run([*argv, "-o", str(partial_file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{compiler} can't compile {source.name}: {done.stderr.strip()[-500:]}")
    partial_file.replace(library)
    return library


def library_for_fakes() -> str:
    """The library that a process loads before torch; empty if torch needs none. Raises: ConfigError."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ConfigError("PyTorch is not installed: pip install 'astraflow[quickstart]'")
    if (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return ""
    return str(build_library(_SOURCE, _CACHE.expanduser(), "-O0"))


class _Stream:
    """A stream, or an event, of a GPU that does nothing."""

    device = "cuda:0"

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return partial(_answer, self)


def _answer(answer: Any, *_: object, **__: object) -> Any:
    return answer


def fake_gpu() -> None:
    """Answers what torch asks a driver. Only for a process that computes nothing else."""
    import torch
    import torch.cuda.amp.common as amp
    import torch.utils._foreach_utils as foreach
    from torch._subclasses.fake_tensor import FakeTensor

    answers = {
        "_lazy_init": None,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "synchronize": None,
        "current_stream": _Stream(),
        "default_stream": _Stream(),
        "stream": contextlib.nullcontext(),
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
    }
    torch.cuda.Stream = torch.cuda.Event = _Stream  # pyright: ignore[reportAttributeAccessIssue]
    for name, answer in answers.items():
        setattr(torch.cuda, name, partial(_answer, answer))
    amp.amp_definitely_not_available = partial(_answer, False)
    types: Any = foreach
    types._foreach_supported_types.append(FakeTensor)
