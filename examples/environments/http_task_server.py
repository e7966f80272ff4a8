"""The base class of environments whose server answers HTTP requests with JSON."""

from typing import TypeVar

import aiohttp
import msgspec

from astraflow import wire
from astraflow.addons.envs.task_servers import MAX_QUOTED, TaskServer
from astraflow.errors import ConfigError, RolloutError

__all__ = ["HttpTaskServer"]

_MAX_BYTES = 8 * 1024 * 1024
"""Largest size of an answer. Some answers repeat the whole history."""

_T = TypeVar("_T")


class HttpTaskServer(TaskServer):
    """A server that answers HTTP requests with JSON. `protocol_name` appears in error messages."""

    protocol_name = ""

    async def open(self) -> None:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._call_s))
        try:
            await self._check_server()
        except RolloutError as err:
            await self._http.close()
            raise ConfigError(str(err)) from err
        except BaseException:
            await self._http.close()
            raise

    async def close(self) -> None:
        await self._http.close()

    async def _check_server(self) -> None:
        """Checks that the server has the tasks. Raises: ConfigError or RolloutError if it doesn't."""
        raise NotImplementedError

    async def _request(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """Sends a request. Returns the status and body of the answer.

        Raises: RolloutError if there is no answer, or it is too large.
        """
        url = f"{self._url}/{path}"
        raw = bytearray()
        try:
            async with self._http.request(method, url, json=body) as answer:
                async for chunk in answer.content.iter_any():
                    raw += chunk
                    if len(raw) > _MAX_BYTES:
                        raise RolloutError(f"{url} answered more than {_MAX_BYTES:,} bytes")
                return answer.status, bytes(raw)
        except TimeoutError as err:
            raise RolloutError(f"{url} did not answer within {self._call_s:.0f} s") from err
        except (aiohttp.ClientError, OSError) as err:
            raise RolloutError(f"{url} did not answer: {type(err).__name__}: {err}") from err

    def _decode(self, raw: bytes, kind: type[_T]) -> _T:
        """Decodes an answer. Raises: RolloutError if it is not of this type."""
        try:
            return wire.decode_foreign_json(raw, kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
            raise RolloutError(
                f"{self._url} answered what {self.protocol_name} does not: {err}: {raw[:MAX_QUOTED]!r}; is "
                "it the address of such a server, with its `/api`?"
            ) from err
