"""Compiles `device.cpp` with the compiler that torch finds, once per source and version of torch."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")


def find_compiler() -> str | None:
    """The C++ compiler that torch's extensions use here; None if there is none."""
    from torch.utils.cpp_extension import get_cxx_compiler

    return shutil.which(get_cxx_compiler())


def build_library(folder: Path) -> Path:
    """The library for the installed torch, from the folder if it is there. Raises: CalledProcessError."""
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    key = hashlib.sha256(f"{torch.__version__} {torch.__file__}".encode() + SOURCE.read_bytes()).hexdigest()[
        :16
    ]
    library = folder / f"posing-{key}.so"
    if library.exists():
        return library
    compiler = find_compiler()
    assert compiler is not None
    paths = library_paths()
    partial = library.with_suffix(f".{os.getpid()}")
    command = [
        *(compiler, "-shared", "-fPIC", "-O1", "-std=c++20", "-Wno-deprecated-declarations", str(SOURCE)),
        *(f"-I{path}" for path in include_paths()),
        *(f"-L{path}" for path in paths),
        *(f"-Wl,-rpath,{path}" for path in paths),
        *("-lc10", "-ltorch_cpu", "-o", str(partial)),
    ]
    subprocess.run(command, check=True, capture_output=True)
    partial.replace(library)
    return library
