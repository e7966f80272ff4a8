"""The viewer over HTTP: what it serves, whom it refuses, and what it makes of damaged and hostile runs."""

import asyncio
import contextlib
import io
import json
import sqlite3
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow.parquet as pq
import pytest

from astraflow.addons.view import app
from astraflow.addons.view.remote import RemoteRun
from astraflow.addons.view.server import Viewing, serve
from astraflow.errors import ConfigError
from astraflow.recipe.run_folder import RunFolder, RunRecord
from drivers.dataflow_driver import ScriptedTrainer, ScriptedWorker, make_plan, running
from drivers.talk_runs import said, save_tokenizer, talk
from drivers.view_runs import RunWriter
from drivers.viewer_driver import ask, viewer

HOSTILE = "<script>alert(1)</script>\x1b]0;pwned\x07 \u202e <img src=x onerror=alert(2)>"


def make_run(folder: Path) -> RunWriter:
    run = RunWriter(folder)
    run.group(0, [0.0, 1.0], version=2)
    run.flush()
    return run


async def test_a_run_is_shown_while_it_grows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    async with viewer(tmp_path) as url:
        assert [each["name"] for each in (await ask(f"{url}/api/runs"))[1]] == ["first"]
        base = f"{url}/api/runs/first"
        assert (await ask(base))[1]["num_episodes"] == 2
        run.group(1, [0.5], fate="stale")
        run.close()
        make_run(tmp_path / "second").close()
        status, found = await ask(f"{base}/episodes?fate=stale")
        assert status == 200
        assert [(row["group"], row["reward"]) for row in found["rows"]] == [(1, 0.5)]
        assert [each["name"] for each in (await ask(f"{url}/api/runs"))[1]] == ["first", "second"]
        view = (await ask(f"{base}/episodes/2"))[1]
        assert view["tokens"]["ids"] == [0, 1, 2, 3]
        assert view["tokens"]["mask"] == [0, 0, 1, 1]
        assert view["tokens"]["logprobs"] == [0.0, 0.0, -0.5, -2.0]
        assert view["tokens"]["versions"] == [-1, -1, 2, 2]
        assert view["metrics"] == {"turns": 1.0, "reward/exact": 1.0}
        group = (await ask(f"{base}/groups/train/0"))[1]
        assert [each["row"]["reward"] for each in group["episodes"]] == [0.0, 1.0]
        events = (await ask(f"{base}/timeline"))[1]["happenings"]
        assert [event["kind"] for event in events] == ["join"]
        assert (await ask(f"{base}/versions"))[1] == []
        lines = (await ask(f"{base}/export?fate=stale&form=jsonl"))[1]
        assert [json.loads(line)["group"] for line in lines.splitlines()] == [1]
        assert (await ask(f"{base}/export?form=parquet"))[1][:4] == b"PAR1"


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
async def test_an_export_may_be_the_first_question_and_holds_all_episodes(tmp_path: Path, form: str) -> None:
    run = make_run(tmp_path / "first")
    for number in range(1, 400):
        run.group(number, [0.5, 0.25], fate="stale")
    run.close()
    async with viewer(tmp_path) as url:
        status, body = await ask(f"{url}/api/runs/first/export?form={form}")
        assert status == 200
        if form == "jsonl":
            rows = [json.loads(line) for line in body.splitlines()]
        else:
            table: Any = pq.read_table(io.BytesIO(body))  # pyright: ignore[reportUnknownMemberType] - not typed
            rows = list(table.to_pylist())
    assert len(rows) == 2 + 2 * 399


async def test_an_export_that_cannot_be_read_is_an_answer_and_no_broken_stream(tmp_path: Path) -> None:
    make_run(tmp_path / "first").close()
    async with viewer(tmp_path) as url:
        base = f"{url}/api/runs/first"
        assert (await ask(f"{base}/export"))[0] == 200
        with sqlite3.connect(tmp_path / "first" / "view" / "index.sqlite") as database:
            database.execute("ALTER TABLE episodes RENAME COLUMN sample TO lost")
        database.close()
        status, error = await ask(f"{base}/export")
    assert (status, error["code"]) == (500, "unreadable")


async def test_a_run_elsewhere_is_shown_as_far_as_its_dataflow_tells_it(tmp_path: Path) -> None:
    async with running(tmp_path / "far", make_plan(num_steps=9), http=True) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        remote = RemoteRun(run.url, every_s=0.0)
        async with viewer(remotes=(remote,)) as url:
            (shown,) = (await ask(f"{url}/api/runs"))[1]
            base = f"{url}/api/runs/{shown['name']}"
            assert (await ask(f"{base}/metrics"))[1] == []
            for step in range(2):
                await worker.send(*[await worker.answer(lease) for lease in await worker.lease()])
                await trainer.train_step(step)
            rows = (await ask(f"{base}/metrics"))[1]
            assert [(row["kind"], row["step"]) for row in rows] == [("step", 1), ("step", 2)]
            overview = (await ask(base))[1]
            assert overview["status"]["dataflow"]["policies"][0]["step"] == 2
            assert "this run is at http://127.0.0.1:" in overview["notes"][0]
            assert (await ask(f"{base}/episodes"))[1]["rows"] == []
        assert not remote.folder.path.exists()


async def test_a_run_elsewhere_that_does_not_answer_says_so() -> None:
    async with viewer(remotes=(RemoteRun("http://127.0.0.1:9"),)) as url:
        (shown,) = (await ask(f"{url}/api/runs"))[1]
        overview = (await ask(f"{url}/api/runs/{shown['name']}"))[1]
        assert "http://127.0.0.1:9" in overview["status"]["problem"]
        assert len(overview["notes"]) == 2


async def test_the_page_runs_no_script_but_its_own(tmp_path: Path) -> None:
    async with viewer(tmp_path) as url, aiohttp.ClientSession() as session:
        async with session.get(url) as reply:
            page = await reply.text()
            policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "http" not in page.replace("http-equiv", "")  # nothing from elsewhere
        assert "<script>" not in page
        for name in ("app.js", "app.css", "icon.svg"):
            async with session.get(f"{url}/assets/{name}") as reply:
                assert reply.status == 200
                assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../app.py",
        "/assets/%2e%2e/app.py",
        "/assets/..%2fapp.py",
        "/api/runs/..",
        "/api/runs/%2e%2e%2fsecret",
        "/api/runs/%2fetc%2fpasswd",
        "/api/runs/run%00",
        "/secrets/viewer",
        "/api/runs/run/episodes/99999999999999999999999",
        "/api/runs/run/groups/train/99999999999999999999999",
        f"/api/runs/run/episodes/{'9' * 5000}",
        f"/api/runs/run/groups/eval/{'9' * 5000}",
    ],
)
async def test_nothing_outside_the_runs_is_served(tmp_path: Path, path: str) -> None:
    make_run(tmp_path / "runs" / "run").close()
    make_run(tmp_path / "secret").close()
    async with viewer(tmp_path / "runs") as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        reply = await reader.read()
        writer.close()
        assert b" 404 " in reply.split(b"\r\n")[0] or b" 400 " in reply.split(b"\r\n")[0]


async def test_web_pages_of_others_are_refused(tmp_path: Path) -> None:
    async with viewer(tmp_path) as url:
        assert (await ask(f"{url}/api/runs", Host="evil.example"))[0] == 403
        assert (await ask(f"{url}/api/runs", Origin="https://evil.example"))[0] == 403
        assert (await ask(f"{url}/api/runs", **{"Sec-Fetch-Site": "cross-site"}))[0] == 403
        assert (await ask(f"{url}/api/runs", Host="localhost"))[0] == 200


async def test_beyond_loopback_only_the_empty_page_needs_no_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        await serve(asyncio.Event(), [tmp_path], Viewing(host="0.0.0.0"))
    async with viewer(tmp_path, host="0.0.0.0", token="sesame") as url:
        assert (await ask(url))[0] == 200
        assert (await ask(f"{url}/assets/app.js"))[0] == 200
        assert (await ask(f"{url}/api/runs"))[0] == 401
        assert (await ask(f"{url}/api/runs", Authorization="Bearer wrong"))[0] == 401
        assert (await ask(f"{url}/api/runs", Authorization="Bearer sesame"))[0] == 200


async def test_hostile_text_stays_text_and_long_text_is_cut(tmp_path: Path) -> None:
    run = RunWriter(tmp_path / "run")
    run.draw(0, task=HOSTILE)
    run.result("0.0.0", policy="<b>policy</b>")
    run.fail("0.1.0", HOSTILE)
    run.transcript(0, 1.0, HOSTILE, "x" * 4_000_000)
    run.close()
    async with viewer(tmp_path) as url:
        rows = (await ask(f"{url}/api/runs/run/episodes"))[1]["rows"]
        assert {row["task"] for row in rows} == {HOSTILE}
        views = [(await ask(f"{url}/api/runs/run/episodes/{row['id']}"))[1] for row in rows]
        assert views[0]["failure"] == HOSTILE
        assert views[1]["problems"] == []
        first, second = views[1]["messages"]
        assert first["content"] == HOSTILE
        assert len(second["content"]) < 300_000
        assert "more characters" in second["content"]


async def test_a_call_that_was_not_read_is_shown_with_its_text(tmp_path: Path) -> None:
    run = RunWriter(tmp_path / "run")
    run.draw(0)
    run.result("0.0.0", unread_calls=1.0)
    run.transcript(0, 1.0, "I look.\n<tool_call>\n<function=find>", role="assistant")
    run.close()
    async with viewer(tmp_path) as url:
        (row,) = (await ask(f"{url}/api/runs/run/episodes"))[1]["rows"]
        view = (await ask(f"{url}/api/runs/run/episodes/{row['id']}"))[1]
        assert view["problems"] == [
            "1 answers look like a tool call that was not read: <tool_call>\n<function=find>"
        ]


async def test_an_episode_has_its_sequences_its_neighbors_and_a_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.draw(1)
    split = talk("Split it.", said("<task>add 2 and 3</task>"), role="agent", whole=1.0)
    run.play("1.0.0", split, talk("add 2 and 3", ((4, "fi"), (5, "ve")), role="helper"), score=1.0)
    run.fail("1.1.0", HOSTILE)
    run.close()
    async with viewer(tmp_path) as url:
        base = f"{url}/api/runs/run"
        view = (await ask(f"{base}/episodes/4"))[1]
        agent, helper = view["sequences"]
        assert (agent["speaker"], helper["speaker"]) == ("actor as agent", "actor as helper")
        assert helper["origin"]["relation"] == "started by sequence 1 in turn 1"
        assert view["versions_said"].startswith("The answer was sampled across two versions: 4 wrote")
        assert view["reward_said"] == "0: its own reward, while the episode's score is 1."
        assert (view["place"]["older"], view["place"]["newer"]) == (2, 5)
        siblings = [(each["id"], each["reward"], each["has_error"]) for each in view["place"]["siblings"]]
        assert siblings == [(3, 1.0, False), (5, None, True)]
        group = (await ask(f"{base}/groups/train/1"))[1]
        assert [each["sequences"] for each in group["episodes"]] == [[], [], []]
        status, file = await ask(f"{base}/episodes/5/file")
        assert status == 200
        assert b"No reward, because the attempt failed: timeout." in file
        assert (await ask(f"{base}/episodes/99/file"))[0] == 404


async def test_a_link_to_an_episode_works_while_the_index_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_FILL_S", 0.0)  # a request fills the index by one record
    run = RunWriter(tmp_path / "run")
    for group_id in range(5):
        run.group(group_id, [0.0, 1.0])
        run.flush()
    run.close()
    async with viewer(tmp_path) as url:
        status, view = await ask(f"{url}/api/runs/run/episodes/10")
        assert (status, view["row"]["group"]) == (200, 4)
        assert (await ask(f"{url}/api/runs/run/episodes/11"))[0] == 404


async def test_a_damaged_run_is_shown_with_notes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"\xff\xfe{not json}\n" + b"z" * 1000 + b"\n")
    (tmp_path / "run" / "recipe.yaml").write_bytes(b"\x00: [")
    (tmp_path / "run" / "run.json").write_text("{")
    path = run.segments / "00000000.seg"
    run.close()
    data = bytearray(path.read_bytes())
    at = data.find(b"behavior_logprobs")
    data[at : at + 4] = b"oops"
    path.write_bytes(data)
    async with viewer(tmp_path) as url:
        status, overview = await ask(f"{url}/api/runs/run")
        assert status == 200
        assert any("recipe" in note for note in overview["notes"])
        assert overview["num_episodes"] == 2
        views = [(await ask(f"{url}/api/runs/run/episodes/{idx}"))[1] for idx in (1, 2)]
        assert [bool(view["problems"]) for view in views] == [True, False]
        assert "is damaged" in views[0]["problems"][0]


async def test_a_killed_run_whose_results_cannot_be_read_says_why(tmp_path: Path) -> None:
    for name in ("no-recipe", "no-journal"):
        make_run(tmp_path / name).close()
        folder = RunFolder(tmp_path / name)
        folder.save_record(RunRecord(name="small", state="stopped", reason="it was killed"))
    save_tokenizer(tmp_path / "no-journal", tmp_path / "model", "actor")
    (tmp_path / "no-journal" / "journal" / "journal.sqlite").write_bytes(b"no database" * 99)
    async with viewer(tmp_path) as url:
        async with asyncio.timeout(20):
            while not (now := (await ask(f"{url}/api/runs/no-recipe/now"))[1])["unreadable"]:
                pass
        assert "recipe.yaml" in now["unreadable"]
        assert now["answer"] is None
        async with asyncio.timeout(20):
            while not (now := (await ask(f"{url}/api/runs/no-journal/now"))[1])["answer"]:
                pass
        assert now["answer"]["sentence"].startswith("There are no results: ")


async def test_wrong_questions_are_answered_in_words(tmp_path: Path) -> None:
    make_run(tmp_path / "run").close()
    async with viewer(tmp_path) as url:
        base = f"{url}/api/runs/run"
        for path, word in (
            ("episodes?rewrd=1", "rewrd"),
            ("episodes?before=x", "before"),
            ("episodes?limit=-1", "limit"),
            ("timeline?from=x", "from"),
            ("export?form=xml", "form"),
            ("metrics?after=%C2%B2", "after"),
        ):
            status, body = await ask(f"{base}/{path}")
            assert status == 400
            assert word in body["message"]


async def test_a_run_that_vanishes_is_gone_from_the_list(tmp_path: Path) -> None:
    make_run(tmp_path / "run").close()
    async with viewer(tmp_path) as url:
        assert (await ask(f"{url}/api/runs/run"))[0] == 200
        with contextlib.suppress(OSError):
            (tmp_path / "run").rename(tmp_path.parent / f"{tmp_path.name}-elsewhere")
        assert (await ask(f"{url}/api/runs/run"))[0] == 404


async def test_lists_have_words_counts_and_ready_searches(tmp_path: Path) -> None:
    run = RunWriter(tmp_path / "run")
    run.group(0, [0.0, 1.0], version=2)
    run.group(1, [0.5, 1.0], fate="stale")
    run.draw(2)
    run.fail("2.0.0", "it took too long")
    run.close()
    async with viewer(tmp_path) as url:
        base = f"{url}/api/runs/run"
        counts = (await ask(f"{base}/facets?fate=stale"))[1]["counts"]
        assert dict(counts["fate"]) == {"trained": 2, "stale": 2}
        assert dict(counts["reward"]) == {"0.000001..0.999999": 1, "1..": 1}  # only of the stale ones
        reason = "stale: its group was too old when a batch was taken"
        assert [row["note"] for row in (await ask(f"{base}/ready/discarded"))[1]] == [reason, reason]
        assert [row["reward"] for row in (await ask(f"{base}/ready/improved"))[1]] == [1.0, 1.0]
        assert [row["note"] for row in (await ask(f"{base}/ready/strange"))[1]] == ["failed"]
        assert (await ask(f"{base}/ready/worst"))[1][0]["note"] == "mean 0.50 of 2 times"
        assert len((await ask(f"{base}/ready/longest"))[1]) == 4
        assert (await ask(f"{base}/ready/versions"))[1] == []
        assert (await ask(f"{base}/ready/other"))[0] == 400
        words = (await ask(f"{base}/snippets?ids=1,2,5,99"))[1]
        assert words["1"] == {"asked": "\u27e80\u27e9\u27e81\u27e9", "answered": "\u27e82\u27e9\u27e83\u27e9"}
        assert words.keys() == {"1", "2", "5"}
        assert (await ask(f"{base}/snippets?ids=1,x"))[0] == 400


async def test_curves_and_the_answer_need_no_index(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder).close()
    lines = [json.dumps({"kind": "step", "policy": "actor", "step": step}) for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], "no row", lines[1], '{"kind": "st']))
    async with viewer(tmp_path) as url:
        rows = (await ask(f"{url}/api/runs/run/metrics"))[1]
        assert [row["step"] for row in rows] == [1, 2]
        assert [
            row["step"] for row in (await ask(f"{url}/api/runs/run/metrics?after={rows[0]['id']}"))[1]
        ] == [2]
        assert (await ask(f"{url}/api/runs/run/metrics?after=999999"))[1] == []
        now = (await ask(f"{url}/api/runs/run/now"))[1]
        assert now.keys() == {"name", "path", "status", "answer"}
        assert not (folder / "view" / "index.sqlite").exists()
        assert (await ask(f"{url}/api/runs/run/index"))[1]["num_episodes"] == 2
