"""Files of the user's own modules: found through imports of any form, and none of them is run."""

import sys
from pathlib import Path

import pytest

from astraflow.user_input.own_sources import own_files

RAISES = "raise AssertionError('imported')\n"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which modules are found."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write(folder: Path, **modules: str) -> None:
    """Writes modules; `a__b` is the module `b` of the package `a`."""
    for name, text in modules.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + RAISES)


def names(module: str, folder: Path) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in own_files(module)]


def test_imports_are_followed_to_the_end(own: Path) -> None:
    write(own, own_a="import own_b\n", own_b="def f():\n    from own_c import x\n", own_c="", own_d="")
    assert names("own_a", own) == ["own_a.py", "own_b.py", "own_c.py"]
    assert not {"own_a", "own_b", "own_c"} & set(sys.modules)


def test_a_circle_ends(own: Path) -> None:
    write(own, own_a="import own_b\n", own_b="import own_a\n")
    assert names("own_a", own) == ["own_a.py", "own_b.py"]


def test_modules_of_packages_are_found_with_and_without_dots(own: Path) -> None:
    write(own, own_p__a="from . import b\nfrom .sub.c import x\n", own_p__b="from own_p.d import *\n")
    write(own, own_p__sub__c="from ..e import y\n", own_p__d="", own_p__e="", own_p__f="")
    assert names("own_p.a", own) == [f"own_p/{name}.py" for name in ("a", "b", "sub/c", "d", "e")]


def test_a_package_with_an_init_is_read_too(own: Path) -> None:
    write(own, own_a="import own_q.b\nimport own_q\n", own_q__b="")
    (own / "own_q" / "__init__.py").write_text("from . import c\n" + RAISES)
    write(own, own_q__c="")
    assert sorted(names("own_a", own)) == ["own_a.py", "own_q/__init__.py", "own_q/b.py", "own_q/c.py"]


def test_installed_packages_and_the_standard_library_are_not_followed(own: Path) -> None:
    write(own, own_a="import json, msgspec, own_none\nfrom astraflow import config\n")
    assert names("own_a", own) == ["own_a.py"]
    assert [file.name for file in own_files("astraflow.config")] == ["config.py"]
    assert own_files("own_none") == []


def test_what_is_no_python_has_no_imports(own: Path) -> None:
    (own / "own_a.py").write_text("import own_b (\n")
    (own / "own_c.py").write_bytes(b"\x00\xff")
    assert names("own_a", own) == ["own_a.py"]
    assert names("own_c", own) == ["own_c.py"]
