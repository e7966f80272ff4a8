"""A server of OpenEnv, as users of the library write one; it runs in the library's own environment.

python tests/drivers/openenv_sums.py PORT
"""

import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class SumAction(Action):
    message: str


class SumObservation(Observation):
    text: str = ""


class Sums(Environment):
    """One sum per episode; an answer ends it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self.total = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        dice = random.Random(seed)
        a, b = dice.randint(0, 9), dice.randint(0, 9)
        self.total = a + b
        return SumObservation(text=f"Calculate {a} + {b}.", done=False, reward=None)

    def step(self, action):
        is_right = action.message.rpartition("=")[2].strip() == str(self.total)
        return SumObservation(done=True, reward=float(is_right))

    @property
    def state(self):
        return State()


app = create_app(Sums, SumAction, SumObservation, env_name="sums", max_concurrent_envs=64)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
