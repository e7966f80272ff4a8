"""The sandbox as an environment of Harbor; with Harbor itself, it is tested in tests/interop."""

import importlib.util

import pytest

from astraflow.addons.envs import harbor_sandbox


@pytest.mark.skipif(importlib.util.find_spec("harbor") is not None, reason="Harbor is installed here")
def test_the_class_alone_needs_harbor() -> None:
    with pytest.raises(ImportError, match="harbor"):
        harbor_sandbox.sandbox_environment()
    assert not hasattr(harbor_sandbox, "Sandbox")
