"""How a recipe names a model that another part asks: a policy of the run, or an endpoint."""

import os
from typing import Self

from pydantic import Field, model_validator

from astraflow.config import Config
from astraflow.errors import ConfigError

__all__ = ["ModelChoice"]


class ModelChoice(Config):
    """A model: a policy of the run, or a model behind an OpenAI-compatible endpoint."""

    policy: str = ""
    """The policy; empty if `url` is set."""
    url: str = ""
    """Base URL of an endpoint, e.g. `http://127.0.0.1:8000/v1`; empty if `policy` is set."""
    model: str = ""
    """Name of the model at `url`; empty: the first one that the endpoint lists."""
    key_variable: str = Field(default="", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")
    """Environment variable of the rollout services with the key for `url`; empty: no key is needed."""

    @model_validator(mode="after")
    def _is_one_model(self) -> Self:
        if bool(self.policy) == bool(self.url):
            raise ValueError("the model is either a `policy` or the one at a `url`; name one of them")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url = {self.url!r} is not a URL; expected e.g. http://127.0.0.1:8000/v1")
        if (self.model or self.key_variable) and not self.url:
            raise ValueError("model and key_variable belong to `url`, which is empty")
        return self

    @property
    def endpoint(self) -> str:
        """The URL and the variable with its key. They are allowed together, because the key is sent to the
        URL."""
        return f"{self.url} {self.key_variable}".strip()

    def api_key(self) -> str:
        """The key for `url`; empty if it needs none. Raises: ConfigError if the variable isn't set here."""
        key = os.environ.get(self.key_variable, "") if self.key_variable else ""
        if self.key_variable and not key:
            raise ConfigError(
                f"key_variable = {self.key_variable!r} of {self.url} is not set in this service's environment"
            )
        return key
