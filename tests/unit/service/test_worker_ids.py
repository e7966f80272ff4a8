"""Ids of rollout services: what others see of them, and what proves that a service owns one."""

from astraflow.service.worker_ids import handle_of, is_key_of, new_worker_id, public_target


def test_only_the_owner_of_an_id_can_prove_it() -> None:
    own, other = new_worker_id("gpu.7"), new_worker_id("gpu.7")
    assert own.handle.startswith("gpu.7.")
    assert handle_of(own.worker_id) == own.handle != other.handle
    assert is_key_of(own.worker_id, own.key)
    assert not is_key_of(other.worker_id, own.key)
    assert not is_key_of(f"{own.handle}.", own.key)
    assert not is_key_of(own.worker_id, "")
    assert len(own.worker_id) == len(own.handle) + 1 + 32


def test_a_target_is_logged_without_its_query_and_its_secret() -> None:
    assert public_target("/v1/workers/gpu.a1b2c3.secret/heartbeat?x=1") == "/v1/workers/gpu.a1b2c3/heartbeat"
    assert public_target("/v1/workers/odd/leases") == "/v1/workers/odd/leases"
    assert public_target("/v1/status?token=secret") == "/v1/status"
