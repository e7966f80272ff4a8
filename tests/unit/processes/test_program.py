"""Which processes a recipe becomes."""

import json
import socket
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from astraflow.addons.inference_servers.config import ServerEngineConfig
from astraflow.errors import ConfigError
from astraflow.processes.dataflow_process import protect
from astraflow.processes.program import Addresses, check_files, choose_addresses, program
from astraflow.recipe.access import check_allowed, needs_tokens, network_modules
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.resume import changes_between
from astraflow.recipe.run_folder import RunFolder
from astraflow.service.client import MemoryTransport
from astraflow.service.loopback import is_loopback


def make_recipe(**changes: object) -> Recipe:
    fields: dict[str, object] = {
        "name": "demo",
        "tasks": {"sources": {"train": {"name": "jsonl", "path": "tasks.jsonl"}}},
        "policies": {"solver": {"model": "models/a"}, "verifier": {"model": "models/b"}},
    }
    return Recipe.model_validate_json(json.dumps(fields | changes))


ADDRESSES = Addresses(("127.0.0.1", 7000), {"solver": ("127.0.0.1", 7001), "verifier": ("127.0.0.1", 7002)})


def test_one_dataflow_a_publisher_and_a_trainer_a_policy_and_the_rollout_services(tmp_path: Path) -> None:
    specs = program(make_recipe(), RunFolder(tmp_path), ADDRESSES)
    assert [spec.name for spec in specs] == [
        "dataflow",
        "publisher-solver",
        "trainer-solver",
        "publisher-verifier",
        "trainer-verifier",
        "rollout-0",
        "rollout-1",
    ]
    assert {spec.name for spec in specs if spec.ends_with_run} == {
        "trainer-solver",
        "trainer-verifier",
        "rollout-0",
        "rollout-1",
    }


def test_a_trainer_of_several_nodes_has_an_agent_on_each_of_the_others(tmp_path: Path) -> None:
    policies = {"solver": {"model": "models/a", "train": {"ranks": 6, "nodes": 3}}}
    cluster = {"trainer": {"cpus": 8, "gpus": 2}}
    for host in ("127.0.0.1", "10.0.0.1"):
        recipe = make_recipe(
            policies=policies, cluster=cluster, dataflow={"host": host}, weights={"host": host}
        )
        addresses = Addresses((host, 7000), {"solver": (host, 7001)})
        specs = [spec for spec in program(recipe, RunFolder(tmp_path), addresses) if "node" in spec.name]
        assert [spec.name for spec in specs] == ["node-solver-1", "node-solver-2"]
        assert {spec.near for spec in specs} == {"launcher" if host == "127.0.0.1" else ""}
        assert {(spec.needs.cpus, spec.needs.gpus, spec.writes) for spec in specs} == {(8, 2, ())}
        assert {spec.needs.gang for spec in specs} == {("node-solver-1", "node-solver-2")}


def test_every_process_gets_its_own_threads(tmp_path: Path) -> None:
    recipe = make_recipe(rollout={"services": 1, "engine": {"name": "torch", "num_threads": 3}})
    threads = {
        spec.name: spec.env["OMP_NUM_THREADS"] for spec in program(recipe, RunFolder(tmp_path), ADDRESSES)
    }
    assert threads == {
        "dataflow": "1",
        "publisher-solver": "1",
        "trainer-solver": "1",
        "publisher-verifier": "1",
        "trainer-verifier": "1",
        "rollout-0": "3",
    }


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cuda:1", {}, "expandable_segments:True"),
        ("cpu", {}, None),
        ("cuda", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, None),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": ""}, None),
    ],
)
def test_a_trainer_on_a_gpu_gets_segments_that_grow_unless_the_user_decides(
    device: str, given: dict[str, str], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    train = {"ranks": 2, "nodes": 2, "backend": {"name": "torch", "device": device}}
    recipe = make_recipe(policies={"solver": {"model": "models/a", "train": train}})
    addresses = Addresses(("127.0.0.1", 7000), {"solver": ("127.0.0.1", 7001)})
    specs = {spec.name: spec.env for spec in program(recipe, RunFolder(tmp_path), addresses)}
    got = {name: env["PYTORCH_ALLOC_CONF"] for name, env in specs.items() if "PYTORCH_ALLOC_CONF" in env}
    assert got == (dict.fromkeys(("trainer-solver", "node-solver-1"), expected) if expected else {})


def test_services_get_their_gpus_in_turn(tmp_path: Path) -> None:
    recipe = make_recipe(rollout={"services": 3, "gpus": ["0", "2,3"]})
    specs = program(recipe, RunFolder(tmp_path), ADDRESSES)
    given = {spec.name: spec.env.get("CUDA_VISIBLE_DEVICES") for spec in specs}
    assert [given.pop(f"rollout-{idx}") for idx in range(3)] == ["0", "2,3", "0"]
    assert set(given.values()) == {None}


def test_a_token_goes_by_environment_and_only_beyond_loopback(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for host, wanted in (("127.0.0.1", False), ("0.0.0.0", True)):
        specs = program(make_recipe(dataflow={"host": host}), folder, ADDRESSES)
        assert {"ASTRAFLOW_TOKEN" in spec.secrets for spec in specs if spec.ends_with_run} == {wanted}
    secrets = {folder.token(role) for role in ("worker", "trainer", "viewer", "admin")}
    public = [part for spec in specs for part in (*spec.argv, *spec.env.values(), repr(spec))]
    assert not [part for part in public for secret in secrets if secret in part]


def test_processes_that_write_the_same_files_share_a_machine(tmp_path: Path) -> None:
    policies = {"solver": {"model": "models/a"}, "judge": {"model": "models/b", "role": "frozen"}}
    recipe = make_recipe(policies=policies)
    addresses = Addresses(("127.0.0.1", 7000), {"solver": ("127.0.0.1", 1), "judge": ("127.0.0.1", 2)})
    specs = {spec.name: spec for spec in program(recipe, RunFolder(tmp_path), addresses)}
    for spec in specs.values():
        for other in specs.values():
            shares = any(a.is_relative_to(b) for a in spec.writes for b in other.writes)
            assert not shares or spec is other or spec.near == other.name
    assert {name: spec.near for name, spec in specs.items()} == {
        "dataflow": "launcher",
        "publisher-solver": "launcher",
        "trainer-solver": "publisher-solver",
        "publisher-judge": "launcher",
        "rollout-0": "launcher",
        "rollout-1": "launcher",
    }
    assert specs["trainer-solver"].writes == (
        tmp_path / "checkpoints/solver",
        tmp_path / "weights/solver/incoming",
    )


def test_what_can_be_called_from_elsewhere_can_run_elsewhere(tmp_path: Path) -> None:
    recipe = make_recipe(
        dataflow={"host": "10.0.0.5"}, weights={"host": "0.0.0.0", "advertise": "gpu-node", "port": 7001}
    )
    addresses = Addresses(("10.0.0.5", 7000), {"solver": ("0.0.0.0", 7001), "verifier": ("0.0.0.0", 7002)})
    specs = {spec.name: spec for spec in program(recipe, RunFolder(tmp_path), addresses)}
    assert specs["dataflow"].near == "launcher"
    assert specs["dataflow"].address == ("10.0.0.5", 7000)
    assert (specs["publisher-solver"].near, specs["rollout-0"].near) == ("", "")
    assert specs["publisher-solver"].address == ("0.0.0.0", 7001)
    assert specs["trainer-solver"].near == "publisher-solver"


def test_a_file_that_a_process_reads_must_exist(tmp_path: Path) -> None:
    recipe = make_recipe(dataflow={"tls": {"cert": str(tmp_path / "cert.pem"), "key": "key.pem"}})
    folder = RunFolder(tmp_path)
    folder.save_recipe(recipe)
    with pytest.raises(ConfigError, match=r"dataflow reads .*cert\.pem, which does not exist"):
        check_files(program(recipe, folder, choose_addresses(recipe, {})))


def test_a_run_with_agent_programs_asks_for_tokens_on_loopback_and_hides_its_folder(
    tmp_path: Path,
) -> None:
    agent = {"name": "agent", "run": {"name": "program", "command": ["my_agent"]}}
    recipe = make_recipe(workflow=agent)
    assert needs_tokens(recipe)
    specs = program(recipe, RunFolder(tmp_path), ADDRESSES)
    assert {spec.env["ASTRAFLOW_PRIVATE"] for spec in specs} == {str(tmp_path.resolve())}
    assert not needs_tokens(make_recipe(workflow={**agent, "run": {"name": "use", "use": "my_agent:solve"}}))


def test_with_a_certificate_all_speak_https_and_trust_it(tmp_path: Path) -> None:
    tls = {"cert": "cert.pem", "key": "key.pem"}
    recipe = make_recipe(dataflow={"tls": tls})
    specs = program(recipe, RunFolder(tmp_path), choose_addresses(recipe, {}))
    assert {spec.env["SSL_CERT_FILE"] for spec in specs} == {"cert.pem"}
    urls = [part for spec in specs for part in spec.argv if part.startswith("http")]
    assert len(urls) >= 3
    assert all(url.startswith("https://127.0.0.1:") for url in urls)
    assert "key.pem" not in str([(spec.argv, spec.env) for spec in specs])
    signed = make_recipe(dataflow={"tls": {**tls, "ca": "ca.pem"}})
    specs = program(signed, RunFolder(tmp_path), choose_addresses(signed, {}))
    assert {spec.env["SSL_CERT_FILE"] for spec in specs} == {"ca.pem"}
    plain = make_recipe()
    specs = program(plain, RunFolder(tmp_path), choose_addresses(plain, {}))
    assert not any("SSL_CERT_FILE" in spec.env for spec in specs)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"dataflow": {"tls": {"cert": "cert.pem"}}}, "tls needs both cert and key"),
        ({"dataflow": {"tls": {"key": "key.pem"}}}, "tls needs both cert and key"),
        ({"dataflow": {"tls": {"ca": "ca.pem"}}}, "ca only works with them"),
        (
            {"dataflow": {"tls": {"cert": "c", "key": "k"}}, "weights": {"peers": True}},
            "peers serve plain HTTP",
        ),
    ],
)
def test_half_a_certificate_and_peers_beside_one_are_refused(
    sections: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_recipe(**sections)


async def test_only_who_needs_a_token_has_a_limit() -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(status_code=204)(scope, receive, send)

    open_to_all = MemoryTransport(protect(answer, {}, 0.01))
    needs_token = MemoryTransport(protect(answer, {"secret": "worker"}, 0.01))
    for transport, expected in ((open_to_all, [204, 204]), (needs_token, [204, 429])):
        headers = {"authorization": "Bearer secret"}
        replies = [
            await transport.request("GET", "/x", headers=headers, body=b"", timeout_s=5.0) for _ in range(2)
        ]
        assert [reply.status for reply in replies] == expected
    reply = await needs_token.request("GET", "/x", headers={}, body=b"", timeout_s=5.0)
    assert reply.status == 401


def test_rollout_services_are_told_which_modules_to_allow(tmp_path: Path) -> None:
    recipe = make_recipe(workflow={"name": "use", "use": "my_agents:solve", "args": {}})
    assert network_modules(recipe) == ("my_agents",)
    rollout = next(s for s in program(recipe, RunFolder(tmp_path), ADDRESSES) if s.name == "rollout-0")
    assert rollout.argv[-2:] == ("--allow", "my_agents")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the range of ephemeral ports from /proc")
def test_no_chosen_port_can_become_the_local_end_of_a_connection() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    chosen = choose_addresses(make_recipe(), {})
    assert max(port for _, port in [chosen.dataflow, *chosen.publishers.values()]) < first


def test_free_ports_are_chosen_and_differ() -> None:
    chosen = choose_addresses(make_recipe(), {})
    ports = {chosen.dataflow[1], *(port for _, port in chosen.publishers.values())}
    assert len(ports) == 3
    assert 0 not in ports


def test_a_resumed_run_takes_its_earlier_ports_again() -> None:
    first = choose_addresses(make_recipe(), {})
    earlier = {"dataflow": first.dataflow[1], "publisher-solver": first.publishers["solver"][1]}
    again = choose_addresses(make_recipe(), earlier)
    assert (again.dataflow, again.publishers["solver"]) == (first.dataflow, first.publishers["solver"])


def test_a_port_that_was_just_chosen_is_not_chosen_again() -> None:
    earlier = {"dataflow": 23_411, "publisher-solver": 23_411, "publisher-verifier": 23_411}
    chosen = choose_addresses(make_recipe(), earlier)
    assert len({chosen.dataflow[1], *(port for _, port in chosen.publishers.values())}) == 3


def test_a_taken_port_of_the_recipe_is_refused_by_key() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*choose another dataflow\.port"):
            choose_addresses(make_recipe(dataflow={"port": port}), {})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"weights": {"port": 65535}}, "65536: the largest port is 65535; choose another weights.port"),
        ({"dataflow": {"port": 7433, "host": "192.0.2.1"}}, "no port of 192.0.2.1 can be bound"),
    ],
)
def test_a_port_or_a_host_that_cannot_exist_is_refused_for_what_it_is(
    changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        choose_addresses(make_recipe(**changes), {})


def test_a_taken_earlier_port_is_replaced() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert choose_addresses(make_recipe(), {"dataflow": port}).dataflow[1] != port


@pytest.mark.parametrize(
    ("host", "is_local"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("10.0.0.1", False)]
)
def test_loopback_is_told_from_the_rest(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local


def test_a_frozen_policy_has_a_publisher_and_a_follower_has_nothing_of_its_own(tmp_path: Path) -> None:
    policies = {
        "solver": {"model": "models/a"},
        "past": {"model": "models/a", "role": "follower", "follows": "solver", "lag": 2},
        "judge": {"model": "models/b", "role": "frozen"},
    }
    addresses = Addresses(("127.0.0.1", 7000), {"solver": ("127.0.0.1", 7001), "judge": ("127.0.0.1", 7002)})
    specs = {s.name: s for s in program(make_recipe(policies=policies), RunFolder(tmp_path), addresses)}
    assert [name for name in specs if "rollout" not in name] == [
        "dataflow",
        "publisher-solver",
        "trainer-solver",
        "publisher-judge",
    ]
    assert specs["publisher-judge"].argv[-2:] == ("--url", "http://127.0.0.1:7000")


@pytest.mark.parametrize(
    ("past", "message"),
    [
        ({"role": "follower"}, "needs `follows`"),
        ({"lag": 2}, "belong to `role: follower`"),
        ({"role": "follower", "follows": "judge"}, "is not a trained policy"),
        ({"role": "follower", "follows": "solver", "model": "models/b"}, "must be that of 'solver'"),
    ],
)
def test_a_follower_names_whom_it_follows(past: dict[str, object], message: str) -> None:
    policies = {
        "solver": {"model": "models/a"},
        "judge": {"model": "models/b", "role": "frozen"},
        "past": {"model": "models/a"} | past,
    }
    with pytest.raises(ValueError, match=message):
        make_recipe(policies=policies)


def test_a_hosts_python_and_what_it_serves_must_be_allowed_where_a_service_joins() -> None:
    recipe = make_recipe(workflow={"name": "hosted", "python": ".venv-games", "serve": "games:Games"})
    assert network_modules(recipe) == (".venv-games games:Games",)
    assert needs_tokens(recipe)
    with pytest.raises(ConfigError, match=r"--allow '\.venv-games games:Games'"):
        check_allowed(recipe, ("games",))
    check_allowed(recipe, network_modules(recipe))


def test_an_agents_command_must_be_allowed_where_a_service_joins(tmp_path: Path) -> None:
    run = {"name": "program", "command": ["python", "my agent.py"]}
    recipe = make_recipe(workflow={"name": "agent", "run": run})
    assert network_modules(recipe) == ("python 'my agent.py'",)
    with pytest.raises(ConfigError, match="--allow"):
        check_allowed(recipe, ())
    check_allowed(recipe, network_modules(recipe))
    specs = program(recipe, RunFolder(tmp_path), ADDRESSES)
    assert specs[-1].argv[-2:] == ("--allow", "python 'my agent.py'")


def test_the_command_of_an_engines_server_must_be_allowed_where_a_service_joins() -> None:
    engine = {"name": "vllm", "python": "/opt/vllm/bin/python", "args": ["--seed", "a b"], "env": {"X": "1"}}
    recipe = make_recipe(rollout={"engine": engine})
    assert network_modules(recipe) == ("X=1 /opt/vllm/bin/python --seed 'a b'",)
    attached = make_recipe(rollout={"engine": {"name": "vllm", "attach": {"url": "http://10.0.0.5:8000"}}})
    assert network_modules(attached) == ()


def test_values_of_an_engines_environment_go_by_environment_only(tmp_path: Path) -> None:
    env = {"HF_TOKEN": "hf_s3cret", "CACHE": "${HOME}"}
    recipe = make_recipe(rollout={"engine": {"name": "vllm", "env": env}})
    folder = RunFolder(tmp_path)
    folder.create()
    folder.save_recipe(recipe)
    other = make_recipe(rollout={"engine": {"name": "vllm", "env": env | {"HF_TOKEN": "hf_0ther"}}})
    folder.note_changes(changes_between(recipe, other))
    specs = program(recipe, folder, ADDRESSES)
    shown = [recipe.model_dump_json(), str([(spec.argv, spec.env) for spec in specs]), repr(specs)]
    shown += [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [text for text in shown if "s3cret" in text or "0ther" in text]
    assert {
        spec.secrets.get("ASTRAFLOW_ENV_HF_TOKEN") for spec in specs if spec.name.startswith("rollout")
    } == {"hf_s3cret"}
    joined = folder.load_recipe()
    assert isinstance(joined.rollout.engine, ServerEngineConfig)
    assert joined.rollout.engine.env == {"HF_TOKEN": "${HF_TOKEN}", "CACHE": "${HOME}"}
    argv = specs[-1].argv
    check_allowed(joined, tuple(argv[idx + 1] for idx, part in enumerate(argv) if part == "--allow"))


@pytest.mark.parametrize(
    ("dataflow", "weights", "announced", "peers"),
    [
        ("127.0.0.1", {}, "127.0.0.1", "127.0.0.1"),
        ("10.0.0.5", {"host": "10.0.0.6"}, "10.0.0.6", "10.0.0.6"),
        ("10.0.0.5", {"host": "0.0.0.0"}, "10.0.0.5", "10.0.0.5"),
        ("10.0.0.5", {"host": "::"}, "10.0.0.5", "10.0.0.5"),
        ("10.0.0.5", {}, "127.0.0.1", "10.0.0.5"),  # where the dataflow sees the run's own services
        ("0.0.0.0", {}, "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", {"host": "0.0.0.0", "advertise": "10.0.0.5"}, "10.0.0.5", "10.0.0.5"),
        ("10.0.0.5", {"host": "10.0.0.5", "advertise": "gpu.example"}, "gpu.example", "10.0.0.5"),
    ],
)
def test_what_is_announced_can_be_called(
    dataflow: str, weights: dict[str, object], announced: str, peers: str
) -> None:
    recipe = make_recipe(dataflow={"host": dataflow}, weights={**weights, "peers": True})
    assert (recipe.advertised_host, recipe.peer_host) == (announced, peers)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_nobody_can_call_is_refused(host: str) -> None:
    with pytest.raises(ValidationError, match=r"weights\.advertise"):
        make_recipe(dataflow={"host": host}, weights={"host": host})
