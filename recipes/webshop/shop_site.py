"""Serves the pages of a shop over HTTP, on this machine only."""

from aiohttp import web
from recipes.webshop.shop_pages import Pages

from astraflow.errors import DataError

__all__ = ["Site"]


class Site:
    """A web server of pages. `start` it, and `stop` it.

    Example: `await site.start()`; then `site.address` is `http://127.0.0.1:41234`.
    """

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        self.address = ""
        """Where it listens, at a port that was free; empty before it is started."""

    async def start(self) -> None:
        """Listens."""
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"http://{host}:{port}"

    async def stop(self) -> None:
        """Stops listening."""
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            html = self._pages.html(str(request.rel_url))
        except DataError as err:
            raise web.HTTPNotFound(text=str(err)) from err
        return web.Response(text=html, content_type="text/html")
