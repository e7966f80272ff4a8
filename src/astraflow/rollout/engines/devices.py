"""What accelerators this machine offers to engines and trainers."""

import torch

__all__ = ["gpu_names"]


def gpu_names() -> tuple[str, ...]:
    """One line a GPU that torch can use: device, name and memory; empty without any."""
    if not torch.cuda.is_available():
        return ()
    return tuple(
        f"cuda:{idx} {torch.cuda.get_device_name(idx)} ({torch.cuda.mem_get_info(idx)[1] / 2**30:.0f} GiB)"
        for idx in range(torch.cuda.device_count())
    )
