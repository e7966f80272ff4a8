"""A version as a folder: which one, where to, and what is never overwritten."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from jinja2 import Template

from astraflow.addons.export.export import export_version
from astraflow.errors import ConfigError, DataError
from astraflow.models.adapters import peft_names
from astraflow.recipe.recipe import load_recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.types import FileInfo
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.manifest import build_manifest, pack
from astraflow.weights.snapshot import read_safetensors
from astraflow.weights.stores.chunk_store import ChunkStore

CHUNK_BYTES = 1 << 20


def tensors(version: int) -> tuple[HostTensor, ...]:
    data = np.full(16, version, dtype=np.uint8)
    narrow = HostTensor("norm", (2,), "bfloat16", data[:4].copy())
    return (narrow, HostTensor("layer.weight", (2, 2), "float32", data))


def with_adapter(version: int) -> tuple[HostTensor, ...]:
    """A base of zeros, and factors whose product has the version's number everywhere."""
    down, up = peft_names("w.weight")
    ones, numbers = np.ones(2, "<f4"), np.full(2, version, "<f4")
    return (
        HostTensor("w.weight", (2, 2), "float32", np.zeros(16, np.uint8)),
        HostTensor(down, (1, 2), "float32", ones.view(np.uint8)),
        HostTensor(up, (2, 1), "float32", numbers.view(np.uint8)),
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    with stored_run(tmp_path, tensors) as path:
        yield path


@contextmanager
def stored_run(
    tmp_path: Path,
    tensors: Callable[[int], tuple[HostTensor, ...]],
    settings: str = "",
    files: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Path]:
    """A run that continues: its publisher holds versions 6 and 7. `settings`: more of the policy; `files`:
    more small files of its model."""
    tmp_path.mkdir(exist_ok=True)
    source = tmp_path / "source.yaml"
    source.write_text(
        "name: demo\n"
        "tasks: {sources: {sums: {name: jsonl, path: tasks.jsonl}}}\n"
        f"policies: {{actor: {{model: models/none, {settings}}}}}\n"
    )
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.save_recipe(load_recipe(source))
    store = ChunkStore(folder.weights / "actor", keep=4)
    for version in (6, 7):
        contents = {"config.json": "{}", **files}
        infos = tuple(FileInfo(name=name, chunk=store.put(text.encode())) for name, text in contents.items())
        store.put(pack(tensors(version)).data)
        store.add(build_manifest("actor", version, tensors(version), chunk_bytes=CHUNK_BYTES, files=infos))
    yield folder.path
    store.close()


def test_the_newest_version_is_written_bit_by_bit(run_dir: Path, tmp_path: Path) -> None:
    done = export_version(run_dir, tmp_path / "deep" / "model")
    assert (done.policy, done.version, done.num_bytes) == ("actor", 7, 20)
    assert sorted(path.name for path in done.folder.iterdir()) == ["config.json", "model.safetensors"]
    written = {
        t.name: (t.dtype, t.shape, t.data.tobytes())
        for t in read_safetensors(done.folder / "model.safetensors")
    }
    assert written == {t.name: (t.dtype, t.shape, t.data.tobytes()) for t in tensors(7)}
    assert [path.name for path in done.folder.parent.iterdir()] == ["model"]


def test_the_template_arguments_of_a_policy_are_the_defaults_of_its_folder(tmp_path: Path) -> None:
    template = "{{ 'yes' if enable_thinking | default(true) else 'no' }}"
    args = "template_args: {enable_thinking: false}"
    with stored_run(tmp_path, tensors, args, {"chat_template.jinja": template}) as run_dir:
        folder = export_version(run_dir, tmp_path / "model").folder
    written = (folder / "chat_template.jinja").read_text()
    assert Template(written, trim_blocks=True).render() == "no"
    assert Template(written, trim_blocks=True).render(enable_thinking=True) == "yes"


def test_an_older_version_is_written_while_it_is_kept(run_dir: Path, tmp_path: Path) -> None:
    assert export_version(run_dir, tmp_path / "model", version=6).version == 6
    with pytest.raises(DataError, match=r"version 5 is not kept \(there are: 6, 7\)"):
        export_version(run_dir, tmp_path / "other", version=5)
    assert not (tmp_path / "other").exists()


def test_an_empty_folder_is_filled(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert export_version(run_dir, tmp_path / "model").version == 7


def test_a_folder_with_something_in_it_is_refused_without_force(run_dir: Path, tmp_path: Path) -> None:
    export_version(run_dir, tmp_path / "model", version=6)
    with pytest.raises(ConfigError, match=r"is not empty; .* --force"):
        export_version(run_dir, tmp_path / "model")
    assert export_version(run_dir, tmp_path / "model", force=True).version == 7
    assert read_safetensors(tmp_path / "model" / "model.safetensors")[0].data[0] == 7


def test_the_adapter_of_a_version_lies_in_its_folder_and_force_replaces_both(tmp_path: Path) -> None:
    for version in (6, 7):
        with stored_run(tmp_path / str(version), with_adapter) as run_dir:
            export_version(run_dir, tmp_path / "model", version=version, force=True)
        (weight,) = read_safetensors(tmp_path / "model" / "model.safetensors")
        assert (weight.name, weight.data.view("<f4").tolist()) == ("w.weight", [float(version)] * 4)
        (down, up) = read_safetensors(tmp_path / "model" / "adapter" / "adapter_model.safetensors")
        assert (down.shape, up.shape) == ((1, 2), (2, 1))
        config = json.loads((tmp_path / "model" / "adapter" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "models/none"


def test_force_replaces_model_folders_only(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("dear")
    for target in (tmp_path / "home", tmp_path / "home" / "thesis.txt"):
        with pytest.raises(ConfigError, match=r"nor a plain model folder|is not a folder"):
            export_version(run_dir, target, force=True)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "dear"


def test_what_is_no_run_and_no_policy_is_named(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run folder"):
        export_version(tmp_path / "nowhere", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"no such policy \(choices: actor\)"):
        export_version(run_dir, tmp_path / "model", policy="critic")
