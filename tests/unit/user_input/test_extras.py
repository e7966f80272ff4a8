"""What is said of a package that is not installed."""

import pytest

from astraflow.user_input.extras import install_hint, missing_module


def test_missing_packages_are_named_with_the_command_that_installs_them() -> None:
    assert install_hint("the demo", ["jinja2", "reasoning_gym"]) == (
        "the demo needs jinja2, reasoning_gym, which the extra quickstart installs: "
        "pip install 'astraflow[quickstart]'"
    )
    hint = install_hint("the demo", ["torch"])
    assert "first: pip install torch --index-url https://download.pytorch.org/whl/cpu" in hint


@pytest.mark.parametrize(
    ("error", "module"),
    [
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "torch"),
        (ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"), "torch"),
        (ModuleNotFoundError("No module named 'torchette'", name="torchette"), ""),
        (ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib"), "matplotlib"),
        (ModuleNotFoundError("No module named 'gguf'", name="gguf"), "gguf"),
        (ModuleNotFoundError("no name"), ""),
        (ImportError("libtorch.so is broken", name="torch"), ""),
    ],
)
def test_only_an_absent_module_of_the_extra_is_a_missing_one(error: Exception, module: str) -> None:
    assert missing_module(error) == module
