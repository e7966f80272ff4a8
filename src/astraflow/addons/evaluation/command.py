"""The command `eval`."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astraflow.cli.command_group import AddedCommand
from astraflow.cli.options import MOST

if TYPE_CHECKING:
    from astraflow.addons.evaluation.evaluation import EvalReport, EvalSize
    from astraflow.addons.evaluation.target import Target

__all__ = ["EVAL", "evaluate"]

_FAILED = 1
_INTERRUPTED = 130
_PAUSE_S = 10.0
"""Pause between two lines of progress if no terminal shows them."""
_Policy = Annotated[
    str, typer.Option("--policy", help="Name of the policy. Default: the recipe's first trained one.")
]
_Target = Annotated[
    str,
    typer.Argument(
        help="Run folder, Hugging Face model folder or name on the hub, or base URL of an OpenAI-compatible "
        "server.",
        metavar="RUN_DIR|MODEL_DIR|URL",
    ),
]
_Recipe = Annotated[
    Path | None,
    typer.Option("--recipe", help="Recipe with the evaluation sets. Default: the run folder's own."),
]
_Sets = Annotated[
    list[str] | None, typer.Option("--set", help="Evaluation set; repeatable. Default: all of the recipe.")
]
_Samples = Annotated[
    int,
    typer.Option(
        "--samples", help="Episodes per task: the k of avg@k. Default: the recipe's.", min=0, max=65_536
    ),
]
_Tasks = Annotated[
    int,
    typer.Option("--tasks", help="Number of tasks from each set. Default: the recipe's.", min=0, max=MOST),
]
_Version = Annotated[
    int, typer.Option("--version", help="Version of a run's weights. Default: the newest.", min=-1, max=MOST)
]
_Model = Annotated[
    str, typer.Option("--model", help="Name of the model at a URL. Default: the first that the server lists.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]


def evaluate(
    target: _Target,
    *,
    recipe: _Recipe = None,
    sets: _Sets = None,
    samples: _Samples = 0,
    tasks: _Tasks = 0,
    version: _Version = -1,
    policy: _Policy = "",
    model: _Model = "",
    as_json: _Json = False,
) -> None:
    """Evaluate a run's weights, a model folder, or an endpoint on a recipe's evaluation sets.

    The command runs in one process, offline and without services. It uses the workflow, sampling, reward, and
    seeds of evaluation during training, so a version of a run gets the score that the run itself reported.
    It prints pass@1, avg@k, and unbiased pass@k with 95 % intervals over tasks. A sample passes if its score
    is at least 1. A URL's key is $OPENAI_API_KEY. The exit code is 1 if an episode failed permanently. Ctrl-C
    ends the evaluation, which then prints the sets that are finished.

    Examples: `astraflow eval runs/quickstart --samples 8`,
    `astraflow eval models/quickstart --recipe recipes/quickstart.yaml --json`,
    `astraflow eval http://127.0.0.1:8000/v1 --recipe recipes/quickstart.yaml --tasks 64`.
    """
    from astraflow.addons.evaluation.evaluation import EvalSize, chosen_sets
    from astraflow.addons.evaluation.target import Endpoint, find_target
    from astraflow.cli.runs import fetch_models
    from astraflow.models.hub import fetch_model, is_hub_name, model_path
    from astraflow.recipe.recipe import load_recipe

    for folder in (Path.cwd(), *((Path(os.path.realpath(recipe)).parent,) if recipe else ())):
        sys.path += [str(folder)] if str(folder) not in sys.path else []
    endpoint = Endpoint(target, model, os.environ.get("OPENAI_API_KEY", ""))
    loaded = fetch_models(load_recipe(recipe)) if recipe else None
    if is_hub_name(target):
        target = str(model_path(fetch_model(target, partial(print, file=sys.stderr))))
    found = find_target(target, loaded, policy=policy, version=version, endpoint=endpoint)
    size = EvalSize(tuple(sets or ()), samples, tasks)
    report = asyncio.run(_evaluate_target(found, size))
    _print_report(report, as_json=as_json)
    finished = {score.eval_set for score in report.sets}
    missing = [name for name in chosen_sets(found.recipe, size) if name not in finished]
    if missing:
        print(f"interrupted; not evaluated: {', '.join(missing)}", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED)
    raise typer.Exit(_FAILED if any(score.num_failed for score in report.sets) else 0)


def _print_report(report: "EvalReport", *, as_json: bool) -> None:
    if as_json:
        import msgspec

        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
        return
    from rich.console import Console

    from astraflow.addons.evaluation.evaluation import evaluation_table

    Console().print(evaluation_table(report))


async def _evaluate_target(target: "Target", size: "EvalSize") -> "EvalReport":
    from astraflow.addons.evaluation.evaluation import EvalReport, evaluate
    from astraflow.addons.evaluation.target import hosting

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)  # so a second signal ends the process at once

    for number in signals:
        loop.add_signal_handler(number, interrupt)
    async with hosting(target) as (hosted, version):
        sets = await evaluate(target.recipe, hosted, size, progress=_progress_printer(), stop=stop)
    return EvalReport(
        target=target.where,
        kind=target.kind,
        recipe=target.recipe.name,
        policy=target.policy,
        version=version,
        temperature=target.recipe.eval.temperature,
        sets=sets,
    )


def _progress_printer() -> Callable[[str, int, int], None]:
    """Makes a function that prints progress on stderr: on one line of a terminal, otherwise now and then."""
    is_terminal = sys.stderr.isatty()
    printed_s = time.monotonic()

    def show(name: str, done: int, total: int) -> None:
        nonlocal printed_s
        is_end = done == total
        if not (is_end or is_terminal or time.monotonic() - printed_s >= _PAUSE_S):
            return
        printed_s = time.monotonic()
        end = "\r" if is_terminal and not is_end else "\n"
        print(f"{name}: {done}/{total} episodes", end=end, file=sys.stderr, flush=True)

    return show


EVAL = AddedCommand(evaluate, after="bundle")
