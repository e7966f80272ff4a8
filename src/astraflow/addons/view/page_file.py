"""The page as a file: it contains the answers that it shows, so it needs no viewer and loads nothing.

The content security policy allows only the page's own script, by its hash, and no requests.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from urllib.parse import quote

import msgspec

from astraflow.addons.view.episode import EpisodeView
from astraflow.addons.view.viewer_page import page_files

__all__ = ["encode_json", "episode_file", "page_file"]


def episode_file(view: EpisodeView, run: str) -> bytes:
    """Makes the file that shows one episode of a run."""
    number = view.row["id"]
    answers = {
        "api/runs": msgspec.json.encode([{"name": run, "sweep": ""}]),
        f"api/runs/{run}/episodes/{number}": encode_json(view),
    }
    return page_file(f"Episode {number} of {run}", f"#/r/{quote(run, safe='')}/episode/{number}", answers)


def encode_json(value: object) -> bytes:
    """Encodes a value as JSON, also if a text has half a surrogate pair. NaN and infinity become null."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value)).encode()


def page_file(title: str, start: str, answers: Mapping[str, bytes]) -> bytes:
    """Puts the page's files and the answers into one file that begins at the link `start`.

    `answers`: path with its query, both decoded -> JSON.
    """
    files = {path: content for path, (_, content) in page_files().items()}
    script = files["/assets/app.js"]
    font = b"data:font/woff2;base64," + base64.b64encode(files["/assets/inter.woff2"])
    style = files["/assets/app.css"].replace(b"inter.woff2", font)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "font-src data:; base-uri 'none'; form-action 'none'"
    )
    items = [b'"start":' + json.dumps(start).encode()]
    items += [json.dumps(path).encode() + b":" + answer for path, answer in answers.items()]
    # In JSON, "<" occurs only in strings, where its escape means the same. So no text can end the element.
    inside = (b"{" + b",".join(items) + b"}").replace(b"<", rb"\u003c")
    return b"".join(
        [
            b'<!doctype html><html lang="en"><head><meta charset="utf-8">',
            b'<meta name="viewport" content="width=device-width, initial-scale=1">',
            b'<meta name="color-scheme" content="light dark">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">'.encode(),
            b"<title>" + escape(title).encode("utf-8", "replace") + b"</title>",
            b"<style>" + style + b"</style></head>",
            b'<body><div id="app"></div><noscript>This file needs JavaScript.</noscript>',
            b'<script id="answers" type="application/json">' + inside + b"</script>",
            b'<script type="module">' + script + b"</script></body></html>\n",
        ]
    )
