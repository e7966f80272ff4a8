import json
from pathlib import Path

from astraflow.processes.program import choose_addresses
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.report.view import View
from astraflow.run.run import Run


async def test_a_process_that_ends_after_the_stop_does_not_bring_the_run_back(tmp_path: Path) -> None:
    fields = {
        "name": "demo",
        "tasks": {"sources": {"train": {"name": "jsonl", "path": "tasks.jsonl"}}},
        "policies": {"actor": {"model": "models/a", "train": {"steps": 3}}},
    }
    recipe = Recipe.model_validate_json(json.dumps(fields))
    folder = RunFolder(tmp_path)
    folder.create()
    run = Run(recipe, folder, choose_addresses(recipe, {}), View(), pages=(), module_path=())
    run.note_change()
    assert folder.load_record().state == "running"
    run.note_stop("it was interrupted")
    await run.stop()
    run.note_change()
    assert (folder.load_record().state, folder.load_record().reason) == ("stopped", "it was interrupted")
