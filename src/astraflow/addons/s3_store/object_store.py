"""A bucket. `obstore` takes credentials, region and endpoint from the environment, as AWS's tools do."""

from pathlib import Path

from astraflow.errors import ConfigError

__all__ = ["ObjectStore"]


class ObjectStore:
    """A bucket, or a prefix of one. Raises: ConfigError without `obstore`, or for a URL that it refuses."""

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError as err:
            raise ConfigError(f"{url} needs the package obstore: pip install 'astraflow[store]'") from err
        self._obstore = obstore
        self._error = BaseError
        try:
            self._store = from_url(url, client_options={"allow_http": True})
        except (BaseError, ValueError) as err:
            raise ConfigError(f"{url} cannot be opened: {err}") from err

    async def put(self, name: str, content: Path | bytes) -> None:
        """Uploads a file, in parts if it is large."""
        try:
            await self._obstore.put_async(self._store, name, content)
        except self._error as err:
            raise OSError(str(err)) from err

    async def delete(self, name: str) -> None:
        """Deletes an object."""
        try:
            await self._obstore.delete_async(self._store, name)
        except FileNotFoundError:
            return
        except self._error as err:
            raise OSError(str(err)) from err

    async def read(self, name: str, start: int, end: int) -> bytes:
        """Bytes `[start, end)`. Raises: FileNotFoundError, OSError."""
        try:
            return bytes(await self._obstore.get_range_async(self._store, name, start=start, end=end))
        except self._error as err:
            raise OSError(str(err)) from err

    async def read_all(self, name: str) -> bytes:
        """A whole object. Raises: FileNotFoundError, OSError."""
        try:
            return bytes(await (await self._obstore.get_async(self._store, name)).bytes_async())
        except self._error as err:
            raise OSError(str(err)) from err
