"""Weight publication of a recipe."""

from ipaddress import ip_network

from pydantic import Field, field_validator, model_validator

from astraflow.config import Config, Word

__all__ = ["WeightsConfig"]


class WeightsConfig(Config):
    """The publisher of weights, and how versions travel to the rollout services."""

    host: Word = "127.0.0.1"
    """Address that the publisher binds; it also announces this address unless `advertise` names another."""
    advertise: Word = ""
    """Address that others use to call the publisher; empty: `host`, or the dataflow's address if
    `host` listens everywhere (`0.0.0.0`)."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to bind; 0 chooses a free one."""
    chunk_bytes: int = Field(default=16 * 1024 * 1024, ge=4096, le=1024 * 1024 * 1024)
    """Size of a chunk in bytes; the last chunk of a version may be smaller."""
    keep: int = Field(default=4, ge=1)
    """Number of newest versions that stay downloadable; versions that evaluation needs stay as well."""
    delta: bool = False
    """Publish only what changed since the previous version, losslessly; worthwhile if few elements change
    (bf16)."""
    full_every: int = Field(default=16, ge=1)
    """With `delta`: publish every Nth version in full, for services that join or have lost their copy. At
    least this many versions are kept, for services that lag behind."""
    max_upload_mb_s: float = Field(default=0.0, ge=0)
    """Largest upload rate in megabytes per second, for the publisher and for each peer; 0: no limit."""
    store: str = ""
    """Also put versions into `file:///shared/folder` or `s3://bucket/prefix`; empty: no store."""
    is_store_only: bool = False
    """Name only the store in manifests, for a publisher that others cannot reach, for example behind NAT."""
    peers: bool = False
    """Let rollout services serve their chunks to each other. Services that `astraflow run` starts do so; a
    service that joins does so with `--peer HOST`. If false, services do not learn each other's addresses."""
    peer_networks: tuple[str, ...] = ()
    """Networks, such as `10.0.0.0/8`, in which a peer's address must lie; empty: the address must be the one
    from which the service calls the dataflow."""

    @field_validator("peer_networks")
    @classmethod
    def _networks_are_valid(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            ip_network(network)  # raises a ValueError that says what is wrong
        return networks

    @model_validator(mode="after")
    def _store_is_named(self) -> "WeightsConfig":
        if self.store and not self.store.startswith(("file:///", "s3://")):
            raise ValueError(f"store {self.store!r}: expected file:///folder or s3://bucket/prefix")
        if self.is_store_only and not self.store:
            raise ValueError("is_store_only needs a store")
        return self
