"""The engine over servers that can free their GPU while another program uses it."""

from astraflow.addons.inference_servers.config import ServerEngineConfig
from astraflow.addons.inference_servers.server_engine import ServerEngine
from astraflow.addons.inference_servers.vllm_api import VllmApi
from astraflow.types.host_tensors import WeightSnapshot

__all__ = ["SleepingServerEngine"]


class SleepingServerEngine(ServerEngine):
    """Also implements `SleepingEngine` of the add-on `lending`.

    Example: see `ServerEngine`; then `await engine.sleep()`.
    """

    def __init__(self, api: VllmApi, config: ServerEngineConfig, snapshot: WeightSnapshot) -> None:
        super().__init__(api, config, snapshot)
        self._sleeping_api = api

    async def cut(self) -> None:
        """Ends all requests now, with the finish reason `abort`."""
        for slot in self.slots.values():
            await slot.cut(self._sleeping_api)

    async def sleep(self) -> None:
        """Frees the memory of the GPU. Raises: UnavailableError or RefusedError if a server doesn't sleep."""
        for slot in self.slots.values():
            await slot.sleep(self._sleeping_api)

    async def wake(self) -> None:
        """Generates again. Raises: UnavailableError or RefusedError if a server doesn't wake up."""
        for slot in self.slots.values():
            await slot.wake(self._sleeping_api)
