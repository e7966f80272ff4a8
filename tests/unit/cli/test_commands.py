"""The command line: help, exit codes, one line an error. Commands that start services are system tests."""

import subprocess
import sys
from pathlib import Path

import pytest

import astraflow
from astraflow.cli.main import main
from drivers.weight_files import write_model_folder


def run(*arguments: str) -> int:
    """The exit code of a command run in this process."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    code = caught.value.code
    assert isinstance(code, int)
    return code


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "name: demo\n"
        "tasks: {sources: {train: {name: jsonl, path: tasks.jsonl}}}\n"
        "policies: {actor: {model: models/none}}\n"
    )
    return path


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for command in (
        *(
            "demo",
            "init",
            "recipes",
            "run",
            "try",
            "status",
            "view",
            "top",
            "episodes",
            "report",
            "audit",
            "drop-batch",
            "doctor",
            "plan",
            "bundle",
            "eval",
            "export",
        ),
        "model",
        *("join", "serve", "publish", "train"),
    ):
        assert f" {command} " in text


@pytest.mark.parametrize(
    "command",
    [
        *[
            ("run",),
            ("try",),
            ("status",),
            ("audit",),
            ("drop-batch",),
            ("doctor",),
            ("plan",),
            ("eval",),
            ("export",),
        ],
        *[("model", "init"), ("join",), ("serve",), ("demo",), ("init",), ("recipes", "copy")],
    ],
)
def test_every_command_explains_itself(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command, "--help") == 0
    assert "Usage: astraflow" in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("astraflow ")


def test_the_package_runs_as_the_command() -> None:
    text = subprocess.check_output([sys.executable, "-m", "astraflow", "--version"], text=True)
    assert text == f"astraflow {astraflow.__version__}\n"


def test_a_dry_run_prints_the_recipe_with_its_changes(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model_folder(tmp_path / "model")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 64)
    changes = ("seed=5", "policies.actor.train.lr=0.5", "model=./model", "rollout.engine.max_context=512")
    assert run("run", str(recipe), *changes, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "seed: 5\n" in out
    assert "lr: 0.5\n" in out


@pytest.mark.timeout(60)
def test_weights_that_do_not_fit_are_refused_by_every_command_with_the_same_sentence(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model_folder(tmp_path / "model", '{"num_hidden_layers": 2}')
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 64)
    said = (
        "model = './model': its weights are not those of a Qwen3ForCausalLM as its config.json describes it "
        "(missing: model.layers.1."
    )
    for command in (("run", "--dry-run"), ("run",), ("try",)):
        name, *options = command
        assert run(name, str(recipe), "model=./model", *options) == 2
        assert said in capsys.readouterr().err
    assert run("doctor", str(recipe), "model=./model") == 1
    assert said in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("policies.actor.train.looss=1",), 'train.looss is not a key; did you mean "loss"?'),
        (("seed",), "override 'seed' is not of the form a.b=value"),
        (("policies.actr.model=x", "--dry-run"), 'did you mean "actor"?'),
        ((), "policies.actor.model = 'models/none': no such folder"),
    ],
)
def test_a_wrong_recipe_is_one_clear_line(
    arguments: tuple[str, ...], message: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = recipe.parent / "run"
    assert run("run", str(recipe), *arguments, "--run-dir", str(run_dir)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not run_dir.exists()


def test_a_recipe_that_is_not_there_leads_to_those_that_come_with_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("run", "recipes/quickstart.yaml") == 2
    assert "`astraflow recipes copy NAME`" in capsys.readouterr().err


def test_a_missing_recipe_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", "nowhere.yaml") == 2
    assert "nowhere.yaml does not exist" in capsys.readouterr().err


def test_what_is_no_run_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("audit", str(tmp_path / "none")) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_a_token_file_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("join", "http://127.0.0.1:9", "--token-file", str(tmp_path / "none")) == 2
    assert "--token-file" in capsys.readouterr().err


def test_a_file_of_certificates_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "ca.pem")
    assert run("join", "https://127.0.0.1:9", "--ca-file", missing) == 2
    assert f"--ca-file {missing} is not a file" in capsys.readouterr().err


def test_a_peer_of_a_run_over_https_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("join", "https://127.0.0.1:9", "--peer", "127.0.0.1") == 2
    assert "--peer serves plain HTTP" in capsys.readouterr().err


def test_a_bug_in_the_users_code_is_told_by_its_own_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model_folder(tmp_path / "model")
    (tmp_path / "odd_source.py").write_text(
        "class Odd:\n"
        "    def __len__(self):\n        return self.size({})\n"
        "    def size(self, row):\n        return row['size']\n"
        "    def task(self, idx):\n        return None\n"
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "name: demo\n"
        'tasks: {sources: {train: {use: "odd_source:Odd"}}}\n'
        f"policies: {{actor: {{model: {model}, sampling: {{max_tokens: 16}}}}}}\n"
    )
    assert run("try", str(path)) == 1
    assert capsys.readouterr().err == (
        f"error: KeyError: 'size' ({tmp_path}/odd_source.py, line 5, in size: return row['size'])\n"
        f"  called from {tmp_path}/odd_source.py, line 3, in __len__: return self.size({{}})\n"
    )


def test_debug_shows_the_traceback(recipe: Path) -> None:
    argv = [sys.executable, "-m", "astraflow.cli.main", "--debug", "run", str(recipe)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=recipe.parent)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.timeout(60)
def test_the_command_line_imports_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "numpy", "aiohttp", "pydantic", "rich.live", "matplotlib"]
    code = f"import sys, astraflow.cli.main; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
