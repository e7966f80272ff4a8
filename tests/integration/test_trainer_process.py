"""A trainer started by hand finds what it needs in the run folder that it was given."""

import asyncio
import json
from pathlib import Path

from starlette.types import Receive, Scope, Send

from astraflow.processes.trainer_process import run_policy_trainer
from astraflow.recipe.run_folder import RunFolder
from astraflow.service.server import HttpServer
from drivers.recipe_builders import make_digit_model, make_digit_recipe


class EndedRun:
    """A dataflow whose run is over; keeps what callers show of themselves."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        self.shown.append(dict(scope["headers"]).get(b"authorization", b"").decode())
        body = json.dumps({"code": "finished", "message": "the run is over"}).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 409, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def test_beyond_loopback_a_trainer_takes_the_token_of_its_run_folder(tmp_path: Path) -> None:
    recipe = make_digit_recipe(tmp_path, make_digit_model(tmp_path / "model"), "dataflow.host=0.0.0.0")
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.save_recipe(recipe)
    dataflow = EndedRun()
    server = HttpServer(dataflow, host="127.0.0.1", port=0, name="dataflow")
    url = await server.start()
    try:
        for token in ("", "another"):
            code = await run_policy_trainer(
                asyncio.Event(), folder.path, policy="actor", url=url, publisher_url=url, token=token
            )
            assert code == 0
    finally:
        await server.stop()
    assert dataflow.shown == [f"Bearer {folder.token('trainer')}", "Bearer another"]
