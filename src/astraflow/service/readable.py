"""Waits until a file descriptor is readable."""

import asyncio

__all__ = ["until_readable"]


async def until_readable(fd: int) -> None:
    """Returns once there are bytes to read or a connection to accept, or the other end has closed."""
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    loop.add_reader(fd, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(fd)
