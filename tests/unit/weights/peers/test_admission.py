"""Whether the versions of a transfer fit into memory and onto the disk."""

import shutil
from pathlib import Path

import msgspec
import pytest

from astraflow.errors import WeightsError
from astraflow.service.memory import available_bytes
from astraflow.types import Chunk, FileInfo, Manifest
from astraflow.weights.manifest import build_manifest, hash_bytes
from astraflow.weights.peers.admission import check_encoding, check_fits, check_follows
from drivers.weight_fakes import make_host_tensor


def manifest(version: int, num_bytes: int, *, file_bytes: int = 0) -> Manifest:
    full = build_manifest("actor", version, [make_host_tensor(shape=(num_bytes // 4,))], chunk_bytes=4096)
    chunk = Chunk(hash=hash_bytes(b"config"), num_bytes=file_bytes)
    files = (FileInfo(name="config.json", chunk=chunk),) if file_bytes else ()
    return msgspec.structs.replace(full, files=files)


def test_all_chunks_on_the_way_and_the_files_of_the_last_version_must_fit_into_memory(tmp_path: Path) -> None:
    path = [manifest(0, 400), manifest(1, 80, file_bytes=20)]
    check_fits(path, tmp_path, 500)
    check_fits(path, tmp_path, 100, kept_bytes=400)
    told = r"actor.*1: 500 bytes must be fetched into memory, but only 499 are available"
    with pytest.raises(WeightsError, match=told):
        check_fits(path, tmp_path, 499)
    with pytest.raises(WeightsError, match="only 499 are available"):
        check_fits(path, tmp_path, 100, kept_bytes=399)


def test_model_files_must_fit_onto_the_disk_of_a_folder_that_may_not_be_there_yet(tmp_path: Path) -> None:
    much = 2 * shutil.disk_usage(tmp_path).total
    with pytest.raises(
        WeightsError, match=rf"its model files have {much} bytes, but {tmp_path} has room for"
    ):
        check_fits([manifest(0, 4, file_bytes=much)], tmp_path / "cache" / "actor", 4 * much)
    check_fits([manifest(0, 4, file_bytes=9)], tmp_path / "cache" / "actor", 13)


def test_a_version_that_cannot_belong_to_its_policy_is_refused() -> None:
    check_follows(manifest(1, 1 << 20), manifest(0, 4))  # a small one is never too large
    with pytest.raises(WeightsError, match=f"need {(1 << 20) + 4} bytes.* has 4; .* at most {1 << 20}"):
        check_follows(manifest(1, (1 << 20) + 4), manifest(0, 4))
    check_follows(manifest(1, 8 << 18), manifest(0, 1 << 18))
    with pytest.raises(WeightsError, match=f"can have at most {8 << 18}"):
        check_follows(manifest(1, (8 << 18) + 4), manifest(0, 1 << 18))


def test_only_known_encodings_are_fetched() -> None:
    check_encoding(manifest(0, 4))
    with pytest.raises(WeightsError, match="unknown encoding 'raw' of a delta version"):
        check_encoding(msgspec.structs.replace(manifest(1, 4), kind="delta", base=0))
    with pytest.raises(WeightsError, match="unknown encoding 'odd' of a full version; expected 'raw'"):
        check_encoding(msgspec.structs.replace(manifest(1, 4), encoding="odd"))


def test_this_process_can_allocate_something_but_no_more_than_the_machine_has() -> None:
    assert 1 << 20 < available_bytes() <= 1 << 62
