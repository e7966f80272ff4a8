"""Weight publication of a recipe."""

from ipaddress import ip_network

from pydantic import Field, field_validator, model_validator

from astraflow.config import Config

__all__ = ["WeightsConfig"]


class WeightsConfig(Config):
    """The publisher."""

    host: str = "127.0.0.1"
    """Address that the publisher binds, and announces unless `advertise` names another."""
    advertise: str = ""
    """Address of the publisher that others are told to call; empty: `host`, or, if that listens everywhere
    (`0.0.0.0`), the dataflow's."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free one."""
    chunk_bytes: int = Field(default=16 * 1024 * 1024, ge=4096, le=1024 * 1024 * 1024)
    """Size of a chunk; the last one of a version may be smaller."""
    keep: int = Field(default=4, ge=1)
    """Newest versions that stay downloadable; those that evaluation needs stay as well."""
    delta: bool = False
    """Publish what changed since the version before, lossless; pays where few elements change (bf16)."""
    full_every: int = Field(default=16, ge=1)
    """With `delta`: every so many versions one is published in full as well, for who joins or lost its
    copy; at least as many versions are kept, for who is behind."""
    max_upload_mb_s: float = Field(default=0.0, ge=0)
    """Megabytes a second that the publisher sends at most, and as many each peer; 0: no limit."""
    store: str = ""
    """Also put versions into `file:///shared/folder` or `s3://bucket/prefix`; empty: nowhere."""
    is_store_only: bool = False
    """Manifests name only the store: nobody else can reach the publisher, for example behind NAT."""
    peers: bool = False
    """Rollout services may serve the chunks that they have to other services: those that `astraflow run`
    starts do, and one that joins with `--peer HOST`. Off: no service is told of another."""
    peer_networks: tuple[str, ...] = ()
    """Networks, as `10.0.0.0/8`, in which a peer's address must lie; empty: it is the one that the service
    calls the dataflow from."""

    @field_validator("peer_networks")
    @classmethod
    def _networks_are_some(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            ip_network(network)  # says what is wrong with it
        return networks

    @model_validator(mode="after")
    def _store_is_named(self) -> "WeightsConfig":
        if self.store and not self.store.startswith(("file:///", "s3://")):
            raise ValueError(f"store {self.store!r}: file:///folder or s3://bucket/prefix is expected")
        if self.is_store_only and not self.store:
            raise ValueError("is_store_only needs a store")
        return self
