"""How to install AstraFlow's extras, and which modules `quickstart` provides. The core doesn't need torch."""

from collections.abc import Sequence

__all__ = ["CPU_TORCH_INDEX", "install_command", "install_hint", "missing_module"]

CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU builds."""

_QUICKSTART = frozenset(
    {
        "torch",
        "transformers",
        "accelerate",
        "tokenizers",
        "safetensors",
        "jinja2",
        "reasoning_gym",
        "datasets",
        "math_verify",
        "matplotlib",
        "gguf",
    }
)
"""Modules of the extra `quickstart`, which has everything that a run on one machine needs."""


def install_command(extra: str) -> str:
    """Returns the command that adds an extra to an installed astraflow, wherever it was installed from."""
    return f"pip install 'astraflow[{extra}]'"


def install_hint(what: str, modules: Sequence[str]) -> str:
    """Returns one line: `what` needs these modules of the extra `quickstart`, and how to install them."""
    command = install_command("quickstart")
    hint = f"{what} needs {', '.join(modules)}, which the extra quickstart installs: {command}"
    if "torch" not in modules:
        return hint
    # By default, pip installs the CUDA build from PyPI, which is 2.7 GB large.
    return f"{hint} (without an NVIDIA GPU, first: pip install torch --index-url {CPU_TORCH_INDEX})"


def missing_module(error: BaseException) -> str:
    """Returns the module of the extra `quickstart` whose absence is the error; empty for any other error."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    name = (error.name or "").partition(".")[0]
    return name if name in _QUICKSTART else ""
