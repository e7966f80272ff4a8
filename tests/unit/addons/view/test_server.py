import socket

from astraflow.addons.view.lazy_viewer import free_listener
from astraflow.addons.view.server import new_token


def test_a_taken_port_is_replaced_and_answers_are_sent_at_once() -> None:
    first = free_listener("127.0.0.1", 0)
    port = first.getsockname()[1]
    second = free_listener("127.0.0.1", port)
    assert second.getsockname()[1] != port
    with socket.create_connection(first.getsockname()):
        first.setblocking(True)
        accepted, _ = first.accept()
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        accepted.close()
    first.close()
    second.close()


def test_tokens_differ() -> None:
    assert new_token() != new_token()
    assert len(new_token()) >= 32
