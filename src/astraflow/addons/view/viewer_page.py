"""The files of the viewer's page, which a browser loads before it requests any run."""

from importlib import resources

__all__ = ["PAGE_HEADERS", "PAGE_PATHS", "page_files"]

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every response to a browser."""
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/assets/app.js": ("app.js", "text/javascript"),
    "/assets/app.css": ("app.css", "text/css"),
    "/assets/icon.svg": ("icon.svg", "image/svg+xml"),
    "/assets/inter.woff2": ("inter.woff2", "font/woff2"),
}
PAGE_PATHS = frozenset(_FILES)
"""Paths of the page's files. They contain no data of runs."""


def page_files() -> dict[str, tuple[str, bytes]]:
    """Returns the media type and content of each file, by path."""
    folder = resources.files("astraflow.addons.view").joinpath("assets")
    return {path: (media, folder.joinpath(name).read_bytes()) for path, (name, media) in _FILES.items()}
