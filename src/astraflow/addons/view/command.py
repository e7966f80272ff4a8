"""Commands that show the contents of run folders: `status`, `view`, `top`, `episodes`, `report`, `traces`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from astraflow.cli.command_group import AddedCommand
from astraflow.cli.options import MOST, finite
from astraflow.cli.services import CaFile, trust

__all__ = [
    "EPISODES",
    "REPORT",
    "STATUS",
    "TOP",
    "TRACES",
    "VIEW",
    "episodes",
    "report",
    "status",
    "top",
    "traces",
    "view",
]

_RunDir = Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN_DIR")]


def _filter(text: str) -> Any:
    return typer.Option(help=text, show_default=False, rich_help_panel="Filters")


def episodes(  # size: one parameter per filter
    run_dir: _RunDir,
    *,
    kind: Annotated[str, _filter("train or eval.")] = "",
    policy: Annotated[str, _filter("Policy that acted.")] = "",
    role: Annotated[str, _filter("Role in which it acted.")] = "",
    task: Annotated[str, _filter("Id of the task, or its beginning and a `*`.")] = "",
    group: Annotated[str, _filter("Number of the group, or of the evaluation round.")] = "",
    text: Annotated[str, _filter("Words in what was said, or in the message of a failure.")] = "",
    reward: Annotated[str, _filter("A number or a range: 1, 0..0.5, 0.5.. or ..0.")] = "",
    advantage: Annotated[str, _filter("A number or a range.")] = "",
    tokens: Annotated[str, _filter("Length in tokens: a number or a range.")] = "",
    version: Annotated[str, _filter("Version that sampled tokens: a number or a range.")] = "",
    step: Annotated[str, _filter("Step that trained on it: a number or a range.")] = "",
    worker: Annotated[str, _filter("Rollout service, by name or id.")] = "",
    finish: Annotated[str, _filter("stop, length or abort.")] = "",
    error: Annotated[str, _filter("Class of the failure; `any` or `none`.")] = "",
    fate: Annotated[str, _filter("Fate of the group: trained, filtered, stale, ..., or live.")] = "",
    limit: Annotated[int, typer.Option(help="Most episodes; the newest come first.", min=1, max=MOST)] = 20,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            "--export",
            help="table, jsonl, parquet, or a trace: atif, trace (of verifiers), messages.",
        ),
    ] = "table",
    out: Annotated[Path | None, typer.Option(help="File to write. Default: standard output.")] = None,
    show: Annotated[
        int,
        typer.Option("--id", help="Print this one in full: a number of the first column.", min=0, max=MOST),
    ] = 0,
    html: Annotated[
        Path | None, typer.Option(help="Write the episode of --id as an HTML file instead, to send it.")
    ] = None,
) -> None:
    """List the episodes of a run that pass all filters, or print one in full.

    Works on live, finished, and copied runs. Each line is one trajectory of an episode, an evaluation, or a
    failed attempt. The first call on a large run takes longer because it builds an index in RUN_DIR/view.

    Examples: `astraflow episodes runs/quickstart --reward 0 --fate trained`,
    `astraflow episodes runs/quickstart --kind eval --format parquet --out evals.parquet`,
    `astraflow episodes runs/quickstart --id 53741 --html episode.html`.
    """
    given = dict(locals())
    from astraflow.addons.view.commands import Output, save_episode, show_episode, show_episodes
    from astraflow.addons.view.filters import FILTER_NAMES
    from astraflow.errors import ConfigError

    if html is not None:
        if not show:
            raise ConfigError("--html writes one episode; name it with --id")
        save_episode(run_dir, show, html)
    elif show:
        show_episode(run_dir, show)
    else:
        show_episodes(run_dir, {name: given[name] for name in FILTER_NAMES}, Output(form, out, limit))


def view(  # size: one parameter per option, each with its help
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Run folders, sweeps, folders of these, or URLs of dataflows. Default: runs.",
            metavar="[RUN_DIR|URL]...",
        ),
    ] = None,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port; 0: 7433 or, if that is taken, a free one.", min=0, max=65_535)
    ] = 0,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="File with the token that others must show. Default: a new one."),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file with a certificate: serve https.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with its key.")] = None,
    run_token_file: Annotated[
        Path | None, typer.Option(help="File with the viewer's token of the dataflows that URLs name.")
    ] = None,
    run_ca: Annotated[
        Path | None, typer.Option(help="PEM file that the certificates of these dataflows are checked with.")
    ] = None,
) -> None:
    """Show runs in a browser: curves, services, every episode down to the token, weights, and a timeline.

    The viewer only reads run folders, so you can start and stop it at any time. It works for live, finished,
    and copied runs. For a run that you name by the URL of its dataflow, it shows what the dataflow reports:
    services, alarms, curves, and the recipe. If it listens beyond loopback, browsers need the token that it
    prints.

    Examples: `astraflow view`, `astraflow view runs/a runs/b`,
    `astraflow view runs --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem`,
    `astraflow view https://far:8000 --run-token-file viewer`.
    """
    from astraflow.addons.view.commands import show_page
    from astraflow.addons.view.lazy_viewer import DEFAULT_PORT
    from astraflow.addons.view.remote import RemoteRun
    from astraflow.addons.view.server import Viewing
    from astraflow.errors import ConfigError
    from astraflow.user_input.user_files import read_token

    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together")
    token = read_token(token_file)
    tls = (str(tls_cert), str(tls_key)) if tls_cert and tls_key else None
    named = runs or ["runs"]
    urls = [name for name in named if name.startswith(("http://", "https://"))]
    remotes = [RemoteRun(url, token_file=run_token_file, ca_file=str(run_ca or "")) for url in urls]
    roots = [Path(name) for name in named if name not in urls]
    viewing = Viewing(host=host, port=port or DEFAULT_PORT, token=token, tls=tls)
    show_page(roots, viewing, remotes=remotes, is_port_named=port > 0)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN_DIR...")],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("report.html"),
) -> None:
    """Write an HTML report on one or more runs: curves, outcomes, differences, and episodes.

    The file is self-contained, so you can send and archive it.

    Example: `astraflow report runs/a runs/b --out comparison.html`.
    """
    from astraflow.addons.view.commands import write_report

    write_report(runs, out)


def top(
    where: Annotated[str, typer.Argument(help="Run folder, or URL of a dataflow.", metavar="RUN_DIR|URL")],
    *,
    every_s: Annotated[
        float,
        typer.Option("--every", help="Seconds between two looks.", min=0.2, max=86_400, callback=finite),
    ] = 1.0,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the token. Default: the run folder's own.")
    ] = None,
) -> None:
    """Show the live screen of a run that is running. Ctrl-C quits.

    Example: `astraflow top runs/quickstart`.
    """
    from rich.console import Console

    from astraflow.addons.view.top import show_top
    from astraflow.errors import ConfigError

    console = Console()
    if not console.is_terminal:
        raise ConfigError("`astraflow top` draws in a terminal; elsewhere, use `astraflow status`")
    show_top(where, token_file, console, every_s=every_s)


def traces(
    run_dir: _RunDir,
    *,
    endpoint: Annotated[
        str, typer.Option(help="Base URL of a collector that takes OTLP over HTTP.")
    ] = "http://127.0.0.1:4318",
    every: Annotated[int, typer.Option(help="Trace one group in so many.", min=1, max=MOST)] = 1,
    follow: Annotated[
        bool, typer.Option(help="Go on until the run has ended; else send what there is.")
    ] = True,
    header: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE, sent with each request, such as an API key; repeatable."),
    ] = None,
) -> None:
    """Send a run's episodes as OpenTelemetry traces, and its metrics, to a collector.

    Each episode becomes one trace: its attempts on rollout services, its time in the table, and the step of
    the trainer. The traces are made from the journal of a live, finished, or copied run. Sending a run twice
    sends the same spans. Needs `astraflow[otel]`.

    Example: `astraflow traces runs/quickstart --endpoint http://localhost:4318`.
    """
    from astraflow.addons.view.commands import send_traces

    send_traces(run_dir, endpoint, every=every, until_end=follow, headers=header or [])


def status(
    where: Annotated[str, typer.Argument(help="Run folder, or URL of a dataflow.", metavar="RUN_DIR|URL")],
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the token. Default: the run folder's own.")
    ] = None,
    ca_file: CaFile = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
) -> None:
    """Show the state of a run: steps, queues, services, their last signs of life, and who waits for whom.

    Answers within seconds, even if parts of the run hang. Exits with 1 if a run that should be running does
    not answer.
    """
    from astraflow.addons.view.top import show_status

    trust(ca_file)
    raise typer.Exit(show_status(where, token_file, as_json=as_json))


STATUS = AddedCommand(status, after="try")
VIEW = AddedCommand(view, after="status")
TOP = AddedCommand(top, after="view")
TRACES = AddedCommand(traces, after="top")
EPISODES = AddedCommand(episodes, after="traces")
REPORT = AddedCommand(report, after="episodes")
