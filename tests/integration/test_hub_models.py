"""Models by their names on the hub: downloaded from a server on loopback into a cache of the test's own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivers.hub_server import HubServer, hub_server
from drivers.weight_files import write_model_folder

NOWHERE = "http://127.0.0.1:9"
"""Nothing listens there."""


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server() as server:
        yield server


@pytest.fixture
def published(tmp_path: Path, hub: HubServer) -> str:
    """The commit of org/tiny, a repository with more than what a run reads."""
    (tmp_path / "hub").mkdir()
    folder = write_model_folder(tmp_path / "hub" / "tiny")
    for name in ("README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x" * 100)
    return hub.publish("org/tiny", folder, "v1")


def in_process(tmp_path: Path, url: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder with a cache of its own, and with this hub."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_", "HUGGINGFACE_"))}
    env = kept | {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": url} | variables
    return subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def fetch(tmp_path: Path, url: str, *names: str, **variables: str) -> list[str]:
    """What fetching each of the names returns, or the error."""
    code = (
        "import sys\n"
        "from astraflow.errors import DataError\n"
        "from astraflow.models.hub import fetch_model\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        print(fetch_model(name, lambda line: print(line, file=sys.stderr)))\n"
        "    except DataError as err:\n"
        "        print(err)\n"
    )
    done = in_process(tmp_path, url, "-c", code, *names, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def make_recipe(tmp_path: Path, model: str, **train: object) -> Path:
    tasks = [json.dumps({"prompt": f"{n} + {n}", "answer": str(2 * n)}) for n in range(8)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks) + "\n")
    policy = {
        "model": model,
        "table": {"group_size": 2, "groups_per_batch": 2},
        "sampling": {"max_tokens": 8},
    }
    recipe = {
        "name": "small",
        "tasks": {"sources": {"sums": {"name": "jsonl", "path": "tasks.jsonl"}}, "reward": {"name": "exact"}},
        "policies": {"actor": {**policy, "train": train}},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def test_only_what_a_run_reads_is_downloaded_and_only_once(
    tmp_path: Path, hub: HubServer, published: str
) -> None:
    assert (
        fetch(tmp_path, hub.url, "org/tiny", "org/tiny@v1", f"org/tiny@{published}")
        == [f"org/tiny@{published}"] * 3
    )
    assert sorted(hub.downloads()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip


def test_a_whole_cache_is_enough_without_a_network_and_a_missing_model_says_what_to_do(
    tmp_path: Path, hub: HubServer, published: str
) -> None:
    assert fetch(tmp_path, hub.url, "org/tiny@v1") == [f"org/tiny@{published}"]
    names = ("org/tiny@v1", f"org/tiny@{published}", "org/other")
    *cached, missing = fetch(tmp_path, NOWHERE, *names)
    assert cached == [f"org/tiny@{published}"] * 2
    for said in (
        f"{NOWHERE} cannot be reached",
        "HF_ENDPOINT",
        "hf download org/other --local-dir models/other",
    ):
        assert said in missing
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        num_before = len(hub.requests)
        *cached, missing = fetch(tmp_path, hub.url, *names, **{variable: "1"})
        assert cached == [f"org/tiny@{published}"] * 2
        assert "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids" in missing
        assert len(hub.requests) == num_before


def test_what_the_hub_refuses_is_told_by_its_kind(tmp_path: Path, hub: HubServer, published: str) -> None:
    (tmp_path / "hub" / "old").mkdir()
    (tmp_path / "hub" / "old" / "pytorch_model.bin").write_bytes(b"x")
    hub.publish("org/old", tmp_path / "hub" / "old")
    hub.gated.add("org/gated")
    unknown, revision, gated, old = fetch(
        tmp_path, hub.url, "org/tniy", "org/tiny@v2", "org/gated", "org/old"
    )
    assert f"{hub.url} has no model org/tniy, or the model is private" in unknown
    assert "org/tiny" in revision
    assert "has no revision 'v2'" in revision
    assert "is gated; request access" in gated
    assert "in its main folder (found: pytorch_model.bin" in old


@pytest.mark.parametrize("lost", ["model.safetensors", "tokenizer.json"])
def test_an_interrupted_download_is_completed(
    tmp_path: Path, hub: HubServer, published: str, lost: str
) -> None:
    (name,) = fetch(tmp_path, hub.url, "org/tiny")
    snapshot = tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots" / published
    (snapshot / lost).unlink()
    hub.requests.clear()
    assert fetch(tmp_path, hub.url, name) == [name]
    assert (snapshot / lost).is_file()
    assert "config.json" not in hub.downloads()


def test_weights_are_downloaded_last_so_a_cache_that_has_them_has_all_files(
    tmp_path: Path, hub: HubServer, published: str
) -> None:
    hub.slow.add("tokenizer.json")
    assert fetch(tmp_path, hub.url, "org/tiny") == [f"org/tiny@{published}"]
    assert hub.downloads()[-1] == "model.safetensors"
    assert len(hub.downloads()) > 1


def test_a_run_keeps_the_commit_that_it_began_with(tmp_path: Path, hub: HubServer, published: str) -> None:
    file = make_recipe(tmp_path, "org/tiny", auxiliary={"reference": "org/tiny@v1", "kl": {"coef": 0.1}})
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from astraflow.recipe.recipe import load_recipe\n"
        "from astraflow.run.hub_models import with_fetched_models\n"
        "recipe = with_fetched_models(load_recipe('recipe.yaml'), Path(sys.argv[1]), print)\n"
        "policy = recipe.policies['actor']\n"
        "print(policy.model, policy.train.auxiliary.reference, policy.model_dir)\n"
    )
    snapshots = tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots"
    begun = in_process(tmp_path, hub.url, "-c", code, "runs/a")
    expected = f"org/tiny@{published} org/tiny@{published} {snapshots / published}"
    assert begun.stdout.splitlines()[-1] == expected, begun.stderr
    newer = hub.publish("org/tiny", write_model_folder(tmp_path / "hub" / "newer"))
    assert newer != published
    assert in_process(tmp_path, hub.url, "-c", code, "runs/a").stdout.splitlines()[-1] == expected
    fresh = in_process(tmp_path, hub.url, "-c", code, "runs/b").stdout.splitlines()[-1]
    assert fresh.startswith(f"org/tiny@{newer} org/tiny@{published} ")
    assert file.is_file()


def test_a_dry_run_downloads_nothing_and_says_whether_the_model_is_cached(
    tmp_path: Path, hub: HubServer, published: str
) -> None:
    recipe = make_recipe(tmp_path, "org/tiny")
    command = ("-m", "astraflow.cli.main", "run", str(recipe), "--dry-run")
    done = in_process(tmp_path, hub.url, *command)
    assert done.returncode == 0, done.stderr
    assert "org/tiny is not in the cache" in done.stderr
    assert hub.requests == []
    fetch(tmp_path, hub.url, "org/tiny")
    done = in_process(tmp_path, NOWHERE, *command)
    assert done.returncode == 0, done.stderr
    assert f"(commit {published})" in done.stderr


def test_nothing_is_downloaded_for_a_recipe_with_other_mistakes(
    tmp_path: Path, hub: HubServer, published: str
) -> None:
    recipe = make_recipe(tmp_path, "org/tiny")
    (tmp_path / "tasks.jsonl").unlink()
    done = in_process(tmp_path, hub.url, "-m", "astraflow.cli.main", "run", str(recipe))
    assert done.returncode == 2
    assert "tasks.jsonl does not exist" in done.stderr
    assert published
    assert hub.requests == []
