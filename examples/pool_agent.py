"""An agent outside a run that sizes its pool: it reads the status, and starts or retires rollout services.

    python examples/pool_agent.py runs/quickstart --least 1 --most 4

Change `start` to rent machines. Leave out `cluster.max_services`: such a run sizes its pool itself.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ASTRAFLOW = [sys.executable, "-m", "astraflow.cli.main"]


def change(num_services: int, missing: int, least: int, most: int) -> int:
    """Returns 1 to start a service, -1 to retire one, and 0 to leave the pool as it is."""
    wanted = min(max(num_services + missing, least), most)
    return (wanted > num_services) - (wanted < num_services)


def read_status(run: Path) -> Any:
    return json.loads(subprocess.check_output([*ASTRAFLOW, "status", run, "--json"]))


def start(run: Path, name: str) -> "subprocess.Popen[bytes]":
    """Starts a rollout service, which ends with the run or when it is retired."""
    url = json.loads((run / "run.json").read_text())["url"]
    token = run / "secrets" / "worker"  # a run beyond loopback has one
    given = ["--token-file", token] if token.is_file() else []
    return subprocess.Popen([*ASTRAFLOW, "join", url, "--name", name, *given])


def main(run: Path, least: int, most: int, every_s: int) -> None:
    """Changes the pool by one service at a time, until the run ends."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    while (status := read_status(run))["state"] == "running":
        if flow := status["dataflow"]:  # null while the dataflow starts
            names = [worker["name"] for worker in flow["workers"] if not worker["is_draining"]]
            started = {name: one for name, one in started.items() if one.poll() is None}
            step = change(len({*names, *started}), flow["scaling"]["missing_services"], least, most)
            print(f"{len(names)} services: {step:+d}", flush=True)
            if step > 0:
                name = f"agent-{int(time.time())}"
                started[name] = start(run, name)
            elif step < 0 and names:
                name = max(names, key=lambda name: name.startswith("agent-"))  # those of the run leave last
                subprocess.run([*ASTRAFLOW, "retire", run, name], check=True)
        time.sleep(every_s)


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("run", type=Path)
    for name, default in (("--least", 1), ("--most", 4), ("--every-s", 30)):
        options.add_argument(name, type=int, default=default)
    main(**vars(options.parse_args()))
