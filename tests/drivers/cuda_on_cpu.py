"""megatron-core on CPUs, for tests only: what stands for the parts of CUDA that it insists on.

    what it asks for                                what it gets
    the current device, tensors with device="cuda"  the CPU
    `tensor.cuda()`, `module.cuda()`                 the tensor or the module itself
    `tensor.type()` is a type of `torch.cuda`        the CPU's type under CUDA's name
    `synchronize`, `empty_cache`                     nothing: everything is synchronous
    the state of CUDA's random numbers               the state of the CPU's
    (our check of a recipe) `device: cuda:0`         also `device: cpu`

So no kernel, no stream, and no NCCL is tested. `install` changes this process; `site_folder` changes every
process that starts with the folder in its `PYTHONPATH`, and `environment_on_cpu` those of a virtual
environment, once they look for megatron-core.
"""

import functools
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAKERS = ("tensor", "zeros")
_INSTALL = (
    f"import sys; sys.path.append({str(Path(__file__).parents[1])!r}); "
    "from drivers.cuda_on_cpu import install_when_imported; install_when_imported()"
)
"""A line that Python runs when it starts."""
_installed: list[bool] = []


def install(_: int = 0) -> None:
    """Makes this process's torch say that the CPU is its GPU. Repeated calls do nothing."""
    if _installed:
        return
    _installed.append(True)
    import torch

    from astraflow.addons.megatron import checks

    checks.DEVICE_KINDS.append("cpu")
    cpu = torch.device("cpu")
    replaced: Any = torch.cuda
    replaced.current_device = lambda: cpu
    replaced.synchronize = replaced.empty_cache = lambda *_: None
    replaced.get_rng_state = replaced.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    replaced.manual_seed = lambda _: None
    for name in MAKERS:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensors: Any = torch.Tensor
    tensors.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    tensors.type = _with_cuda_name(torch.Tensor.type)


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def _with_cuda_name(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    return named


class _Finder:
    """Calls `install` before megatron-core is imported; finds nothing itself."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "megatron":
            install()


def install_when_imported() -> None:
    """Calls `install` once megatron-core is imported."""
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]


def site_folder(folder: Path) -> Path:
    """Writes a `sitecustomize.py` that calls `install_when_imported`. Returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"{_INSTALL}\n")
    return folder


def environment_on_cpu(folder: Path) -> Path:
    """A new virtual environment with the packages of this one, which calls `install_when_imported`."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    ours = sysconfig.get_paths()["purelib"]
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n{_INSTALL}\n")
    return folder
