"""The conformance kit finds our trainer sound, and each of its mutants broken on one rule."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow import wire
from astraflow.errors import FencedError
from astraflow.service.client import HttpReply
from astraflow.types import (
    Batch,
    BatchReply,
    Commit,
    MetricItem,
    Publication,
    PublicationReply,
    SessionRequest,
)
from drivers.conformance_driver import (
    ChangesAnswer,
    ChangesBody,
    InProcessTrainer,
    Mutation,
    judged_trainer,
    replaced,
)
from drivers.trainer_fakes import CountingLearner

pytestmark = pytest.mark.timeout(240)
replace = msgspec.structs.replace


async def test_ours_keeps_every_rule(tmp_path: Path) -> None:
    report = await judged_trainer(tmp_path)
    assert report.broken == ()
    assert report.unchecked == ()


class SlowDisk(InProcessTrainer):
    """Its checkpoints are still being written when it is killed."""

    @staticmethod
    def sync(path: Path) -> None:
        time.sleep(0.1)


async def test_ours_on_a_slow_disk_keeps_every_rule(tmp_path: Path) -> None:
    report = await judged_trainer(tmp_path, make_candidate=SlowDisk)
    assert report.broken == ()


# --- mutants --------------------------------------------------------------------------------------


class Asks(Mutation):
    """Asks for more than it should."""

    async def ask(self, method: str, path: str, body: bytes = b"") -> None:
        headers = {"Content-Type": wire.MSGPACK, "Authorization": "Bearer secret"}
        await self.inner.request(method, path, headers=headers, body=body, timeout_s=60.0)


class Babbles(Asks):
    """Sends something that is no item, once."""

    has_babbled = False

    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if path.endswith("/commit") and not self.has_babbled:
            self.has_babbled = True
            await self.ask("POST", path, msgspec.msgpack.encode({"epoch": 1, "mood": "good"}))
        return reply


class RunsAhead(Asks):
    """Asks for a step far beyond the committed ones."""

    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if "/batches/0?" in path and b"samples" in reply.body:
            await self.ask(
                "GET", path.replace("/batches/0?", "/batches/5?").replace("wait_s=25.0", "wait_s=0")
            )
        return reply


class CommitsFirst(Asks):
    """Commits a step before it publishes its version."""

    first = -1

    async def request(self, method: str, path: str, body: bytes) -> tuple[str, bytes] | HttpReply:
        if method == "POST" and path.endswith("/versions"):
            item = wire.decode(body, Publication)
            self.first = item.manifest.version if self.first < 0 else self.first
            if item.manifest.version > self.first:
                commit = Commit(epoch=item.epoch, step=item.step - 1, version=item.manifest.version)
                await self.ask("POST", path.replace("/versions", "/commit"), wire.encode(commit))
        return path, body


class DoesNotHearOfTheFence(Asks):
    """Goes on asking under a session that is over."""

    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if b"fenced" in reply.body:
            for _ in range(5):
                await self.ask(method, path, body)
        return reply


class SkipsAStep(Asks):
    """Takes the second step first, in its second life."""

    num_lives = 0

    def __init__(self) -> None:
        type(self).num_lives += 1
        self.skips = type(self).num_lives == 2

    async def request(self, method: str, path: str, body: bytes) -> tuple[str, bytes] | HttpReply:
        if self.skips and "/batches/" in path:
            self.skips = False
            before, _, rest = path.partition("/batches/")
            step, _, query = rest.partition("?")
            query = query.replace("wait_s=25.0", "wait_s=0")
            await self.ask("GET", f"{before}/batches/{int(step) + 1}?{query}")
        return path, body


class SkipsVersions(Mutation):
    """After the first of a session every version has the number that its successor should have."""

    first = -1

    async def request(self, method: str, path: str, body: bytes) -> tuple[str, bytes] | HttpReply:
        if method == "POST" and path.endswith("/versions"):
            item = wire.decode(body, Publication)
            version = item.manifest.version
            self.first = version if self.first < 0 else self.first
            if version > self.first:
                body = wire.encode(replace(item, manifest=replace(item.manifest, version=version + 1)))
        return path, body


def manifest(change: Callable[[Any], Any]) -> Callable[[], Mutation]:
    """Changes every manifest."""
    return lambda: ChangesBody(
        "/versions", Publication, lambda item: replace(item, manifest=change(item.manifest))
    )


def without_files(item: Any) -> Any:
    return replace(item, files=(), num_bytes=sum(chunk.num_bytes for chunk in item.chunks))


def renamed(item: Any) -> Any:
    return replace(item, tensors=tuple(replace(t, name=f"{t.name}.{item.version}") for t in item.tensors))


class NeverLearns(CountingLearner):
    def train_step(self, batch: Batch) -> Any:
        before = self.weight
        result = super().train_step(batch)
        self.weight = before
        return result


class LosesCheckpoints(InProcessTrainer):
    keep_checkpoints = 1

    async def kill(self) -> None:
        await super().kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class EndsInError(InProcessTrainer):
    async def ended(self) -> int:
        await super().ended()
        return 1


NAN = (MetricItem("loss", float("nan")),)
QUICK: dict[str, tuple[str, dict[str, Any]]] = {
    "speaks another protocol": (
        "T1",
        {"mutation": lambda: ChangesBody("/session", SessionRequest, replaced(protocol=2))},
    ),
    "sends unknown fields": ("T2", {"mutation": Babbles}),
    "forgets the token": ("T3", {"token": ""}),
    "sends no model files": ("T4", {"mutation": manifest(without_files)}),
    "names a wrong digest": (
        "T5",
        {"mutation": manifest(lambda x: replace(x, digest=x.digest[::-1]))},
    ),
    "skips version numbers": ("T6", {"mutation": SkipsVersions}),
    "renames its tensors": ("T7", {"mutation": manifest(renamed)}),
    "runs ahead": ("T8", {"mutation": RunsAhead}),
    "commits before it publishes": ("T10", {"mutation": CommitsFirst}),
    "never learns": ("T12", {"backend": NeverLearns}),
    "does not hear of the fence": ("T13", {"mutation": DoesNotHearOfTheFence}),
    "releases what it can lose": ("T14", {"make_candidate": LosesCheckpoints}),
    "skips a step after a crash": ("T15", {"mutation": SkipsAStep}),
    "deletes needed versions": (
        "T16",
        {
            "mutation": lambda: ChangesAnswer("/versions", PublicationReply, replaced(needed=())),
            "keep": 1,
        },
    ),
    "ends with an error": ("T17", {"make_candidate": EndsInError}),
    "reports what is no number": (
        "T18",
        {"mutation": lambda: ChangesBody("/commit", Commit, replaced(metrics=NAN))},
    ),
}


@pytest.mark.long  # of threads and clocks: a busy machine may show another rule too
@pytest.mark.parametrize("name", QUICK)
async def test_a_mutant_fails_on_the_rule_that_it_breaks(tmp_path: Path, name: str) -> None:
    SkipsAStep.num_lives = 0
    rule, options = QUICK[name]
    report = await judged_trainer(tmp_path, **options)
    assert report.broken == (rule,), [v for v in report.verdicts if v.outcome == "broken"]
    assert report.exit_code == 1


# --- what never happens: the kit's patience must end ----------------------------------------------


class TakesAnythingForACommit(Mutation):
    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        return HttpReply(204, "", b"") if path.endswith("/commit") and reply.status >= 500 else reply


def over(reply: BatchReply) -> BatchReply:
    """No batch yet counts as none ever."""
    return reply if reply.batch else replace(reply, state="finished")


class Zombie(InProcessTrainer):
    async def live(self) -> None:
        while True:
            try:
                return await super().live()
            except FencedError:
                pass


SLOW: dict[str, tuple[str, dict[str, Any]]] = {
    "gives up when there is no batch": (
        "T9",
        {"mutation": lambda: ChangesAnswer("/batches/", BatchReply, over)},
    ),
    "sends each commit once": ("T11", {"mutation": TakesAnythingForACommit}),
    "comes back from a fence": ("T13", {"make_candidate": Zombie}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SLOW)
async def test_a_mutant_that_omits_something_fails_on_that_rule(tmp_path: Path, name: str) -> None:
    rule, options = SLOW[name]
    report = await judged_trainer(tmp_path, patience_s=10.0, **options)
    assert report.broken == (rule,), [v for v in report.verdicts if v.outcome == "broken"]
