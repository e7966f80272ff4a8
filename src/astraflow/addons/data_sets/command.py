"""`astraflow data`: known data sets, prepared once into a folder that runs then read."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from astraflow.cli.command_group import AddedCommand
from astraflow.cli.options import MOST, Port
from astraflow.errors import ConfigError

__all__ = ["DATA", "data", "index_documents", "list_data_sets", "prepare_data_sets", "serve_documents"]

data = typer.Typer(
    help="Prepare known data sets and search indexes for runs that download nothing.", no_args_is_help=True
)


def _names(incomplete: str) -> list[str]:
    """The names of data sets, for shell completion."""
    from astraflow.addons.data_sets.catalogue import DATA_SETS

    return [name for name in DATA_SETS if name.startswith(incomplete)]


@data.command("list")
def list_data_sets() -> None:
    """List the known data sets, with one line about each."""
    from astraflow.addons.data_sets.catalogue import DATA_SETS

    width = max(len(name) for name in DATA_SETS)
    for known in DATA_SETS.values():
        print(f"{known.name:<{width}}  {known.family:<6}  {known.about}")


@data.command("prepare")
def prepare_data_sets(
    names: Annotated[
        list[str],
        typer.Argument(help="Names from `astraflow data list`.", metavar="NAME...", autocompletion=_names),
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder to write, for one data set. Default: data/NAME for each."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Also compare the prepared files with their checksums.")
    ] = False,
    given: Annotated[
        Path | None,
        typer.Option("--from", help="Folder with the published files; nothing is downloaded then."),
    ] = None,
) -> None:
    """Download data sets, convert them, and write them to folders with a manifest and checksums.

    A folder that is already prepared is left unchanged. A recipe names the data set as
    {name: prepared, dataset: NAME}, and then needs no network. Needs the extra `tasks`: pip install
    'astraflow[tasks]'.

    Examples: `astraflow data prepare math500 aime24`,
    `astraflow data prepare deepscaler --out data/deepscaler --verify`.
    """
    from astraflow.addons.data_sets.catalogue import find_data_set
    from astraflow.addons.data_sets.preparing import prepare

    if out is not None and len(names) > 1:
        raise ConfigError("--out names the folder of one data set; leave it out, or prepare one at a time")
    chosen = [find_data_set(name) for name in dict.fromkeys(names)]
    for data_set in chosen:
        folder = out or Path("data") / data_set.name
        manifest = prepare(data_set, folder, given=given, verifies=verify, progress=print)
        for name, split in manifest.splits.items():
            print(f"{folder / split.file}: {split.num_rows:,} {manifest.holds}, split {name}")
            for reason, number in split.left_out.items():
                print(f"  {number:,} rows left out: {reason}")
        if verify:
            print(f"{folder}: all checksums agree")


@data.command("index")
def index_documents(
    documents: Annotated[
        Path,
        typer.Argument(
            help="JSONL file with `title` and `text`, or the folder of a prepared set of documents.",
            metavar="DOCUMENTS",
        ),
    ],
    *,
    out: Annotated[Path, typer.Option("--out", help="Folder to write.")],
    encoder: Annotated[
        str,
        typer.Option(
            "--encoder",
            help="Folder of an embedding model, e.g. of intfloat/e5-base-v2, for a dense index.",
        ),
    ] = "",
    query_prefix: Annotated[
        str, typer.Option("--query-prefix", help="What the encoder expects before a query.")
    ] = "query: ",
    text_prefix: Annotated[
        str, typer.Option("--text-prefix", help="What the encoder expects before a document.")
    ] = "passage: ",
    factory: Annotated[
        str, typer.Option("--factory", help="Kind of a dense index, as faiss.index_factory names it.")
    ] = "Flat",
    on_disk: Annotated[
        bool,
        typer.Option("--on-disk", help="Build BM25 in less than 1 GB of memory, for millions of documents."),
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", help="Documents to take, the first ones; 0 takes all.", min=0, max=MOST)
    ] = 0,
) -> None:
    """Build a search index for the workflow `search`.

    A BM25 index needs the extra `search`, a dense one the extra `dense`.

    Examples: `astraflow data index data/asearcher-corpus --out data/asearcher-index --on-disk`,
    `astraflow data index my.jsonl --out my-index --encoder models/e5-base-v2`.
    """
    from astraflow.addons.search.retrieval.dense import EncoderSettings
    from astraflow.addons.search.retrieval.index import build_index

    file = documents / "documents.jsonl" if documents.is_dir() else documents
    if encoder and on_disk:
        raise ConfigError("--encoder makes a dense index and --on-disk one of BM25; leave one of them out")
    settings = EncoderSettings(encoder, query_prefix, text_prefix, factory) if encoder else None
    manifest = build_index(file, out, encoder=settings, is_on_disk=on_disk, limit=limit, progress=print)
    print(f"{out}: {manifest.kind} index of {manifest.num_documents:,} documents ({manifest.library})")


@data.command("serve")
def serve_documents(
    index: Annotated[Path, typer.Argument(help="Folder that `astraflow data index` wrote.", metavar="INDEX")],
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Port = 0,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="File with the token that searches must show."),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file with a certificate: serve https.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with its key.")] = None,
) -> None:
    """Serve a search index over HTTP, for recipes with `index: {name: server, url: URL}`.

    Rollout services then need neither the index nor its libraries.

    Example: `astraflow data serve data/asearcher-index --host 10.0.0.5 --port 8500
    --token-file search.token`.
    """
    from astraflow.addons.search.retrieval.server import serve_index
    from astraflow.cli.services import run_as
    from astraflow.user_input.user_files import read_token

    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together")
    tls = (str(tls_cert), str(tls_key)) if tls_cert and tls_key else None
    token = read_token(token_file)
    run_as("search", partial(serve_index, folder=index, host=host, port=port, token=token, tls=tls))


DATA = AddedCommand(data, after="model")
