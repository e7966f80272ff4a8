"""Who may call what, and that no token is ever written down."""

import logging
from pathlib import Path

import aiohttp
import pytest

from astraflow.dataflow.api import ROUTES, Route
from astraflow.dataflow.client import DataflowClient
from astraflow.service.client import MemoryTransport, ServiceClient
from astraflow.service.server import HttpServer, TokenAuth
from drivers.dataflow_driver import ScriptedTrainer, ScriptedWorker, refused, running

ROLES = ("worker", "trainer", "viewer", "admin")
TOKENS = {f"{role}-s3cret-{number}": role for number, role in enumerate(ROLES)}


def path_of(route: Route) -> str:
    """A path of the route that exists."""
    path = route.path.replace("{policy}", "actor").replace("{worker_id}", "w0.1").replace("{step:int}", "0")
    return f"{path}?epoch=1" if route.name == "batch" else path


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
async def test_a_route_is_open_to_its_roles_only(route: Route, tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        transport = MemoryTransport(TokenAuth(run.service.app, TOKENS))
        for token, role in (("", ""), ("wrong", ""), *TOKENS.items()):
            if route.name == "stop" and role == "admin":
                continue
            headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
            reply = await transport.request(
                route.method, path_of(route), headers=headers, body=b"{}", timeout_s=5.0
            )
            if not role and route.name != "health":
                assert reply.status == 401
            else:
                is_open = route.name == "health" or role in route.roles
                assert (reply.status not in {401, 403}) is is_open, (role, reply)


def bytes_below(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


async def test_no_token_is_in_logs_journal_or_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    answers = list[str]()
    async with running(tmp_path) as run:
        app = TokenAuth(run.service.app, TOKENS)
        server = HttpServer(app, host="127.0.0.1", port=0, name="dataflow")
        url = await server.start()
        by_role = {role: ServiceClient(url, token=token, patience_s=1.0) for token, role in TOKENS.items()}
        worker = ScriptedWorker(DataflowClient(by_role["worker"]))
        trainer = ScriptedTrainer(DataflowClient(by_role["trainer"]))
        await trainer.attach()
        await worker.register()
        await worker.send(*[await worker.answer(lease) for lease in await worker.lease(num_free=16)])
        for role, client in by_role.items():
            link = DataflowClient(client)
            answers += [str(await link.status()), str(await link.run())]
            if role != "admin":
                answers.append(str(await refused(link.stop("now"))))
        almost = [*TOKENS, *(f" {token}" for token in TOKENS), *(f"{token}x" for token in TOKENS)]
        async with aiohttp.ClientSession() as session:
            for scheme in ("Bearer", "Basic", "bearer "):
                for token in almost:
                    headers = {"Authorization": f"{scheme} {token}"}
                    for method, path in (("GET", "/metrics"), ("POST", "/v1/leases"), ("GET", "/nowhere")):
                        call = session.request(method, url + path, headers=headers, data=b"{")
                        async with call as answer:
                            answers.append(await answer.text())
        await DataflowClient(by_role["admin"]).stop("enough")
        for client in by_role.values():
            await client.close()
        await server.stop()
    texts = [caplog.text.encode(), *(text.encode() for text in answers), *bytes_below(tmp_path)]
    assert len(texts) > 100
    assert not [token for token in TOKENS for text in texts if token.encode() in text]
