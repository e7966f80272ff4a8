"""Posing GPUs: tensors that say `cuda:k` and hold their values in host memory, for tests on CPUs.

`load` loads `device.cpp` into this process, and `install` replaces what `torch.cuda` asks a driver. Then the
code of a GPU run runs as it is: tensors are on devices and can't be mixed, memory is limited, and copies
and waits are counted. Collectives of `nccl` go over gloo, and refuse two ranks on one GPU, as NCCL does. Of
eight GPUs, a process sees those that `CUDA_VISIBLE_DEVICES` lists.

They can't show the results and the speed of CUDA kernels, streams and races (everything is synchronous), the
memory of kernels, contexts and other processes (only tensors count), or NCCL's own failures. With
`BLOCKING_VARIABLE`, a collective waits forever once a peer is gone, as NCCL's do; gloo's raise an error.

The library must be loaded before torch, which looks for CUDA once. `site/sitecustomize.py` does this in every
process that has the variables of `environment`.
"""

import contextlib
import ctypes
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "BLOCKING_VARIABLE",
    "CAPABILITY_VARIABLE",
    "CAPACITY_VARIABLE",
    "LIBRARY_VARIABLE",
    "NAME_VARIABLE",
    "PROBLEM_VARIABLE",
    "TAKEN_VARIABLE",
    "counters",
    "environment",
    "install",
    "peak_bytes",
    "reset_counters",
    "set_capacity",
    "used_bytes",
]

LIBRARY_VARIABLE = "ASTRAFLOW_POSING_LIBRARY"
BLOCKING_VARIABLE = "ASTRAFLOW_POSING_BLOCKS"
CAPACITY_VARIABLE = "ASTRAFLOW_POSING_BYTES"
"""Memory of each device; 80 GiB if it is not set."""
TAKEN_VARIABLE = "ASTRAFLOW_POSING_TAKEN_BYTES"
"""Memory of each device that other processes take."""
NAME_VARIABLE = "ASTRAFLOW_POSING_NAME"
CAPABILITY_VARIABLE = "ASTRAFLOW_POSING_CAPABILITY"
"""Compute capability of each device, such as `7.0`; 9.0 if it is not set."""
PROBLEM_VARIABLE = "ASTRAFLOW_POSING_PROBLEM"
"""What torch says when it asks the driver for a device."""
ARCHES = ["sm_80", "sm_90", "sm_100", "compute_120"]
"""What this torch was built for."""
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
NUM_DEVICES = 8
_loaded: list[Any] = []


def environment(library: Path, **variables: str) -> dict[str, str]:
    """The environment in which a process and all that it starts see posing GPUs."""
    site = Path(__file__).with_name("site")
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    return {
        **os.environ,
        "PYTHONPATH": path,
        LIBRARY_VARIABLE: str(library),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **variables,
    }


def visible() -> list[str]:
    """The devices that this process sees."""
    named = os.environ.get(VISIBLE_VARIABLE)
    return (
        [str(idx) for idx in range(NUM_DEVICES)]
        if named is None
        else [each for each in named.split(",") if each]
    )


def load(library: str) -> None:
    """Loads the devices. Call it before torch is imported."""
    if not _loaded:
        _loaded.append(ctypes.CDLL(library, ctypes.RTLD_GLOBAL))


def _library() -> Any:
    library = _loaded[0]
    for name in ("posing_used", "posing_peak", "posing_capacity"):
        getattr(library, name).restype = ctypes.c_int64
    return library


def used_bytes(device: int = 0) -> int:
    """Bytes of all tensors on a device."""
    return int(_library().posing_used(device))


def peak_bytes(device: int = 0) -> int:
    """The most that `used_bytes` has been since the peak was reset."""
    return int(_library().posing_peak(device))


def set_capacity(capacity: int) -> None:
    """Sets the memory of each device, in bytes."""
    _library().posing_set_up(len(visible()), ctypes.c_int64(capacity))


def counters() -> Mapping[str, int]:
    """Number of calls of each operation. Those for which the host waits begin with `wait:`."""
    library = _library()
    text = ctypes.create_string_buffer(int(library.posing_counters(None, 0)) + 4096)
    library.posing_counters(text, len(text))
    lines = (line.rsplit(" ", 1) for line in text.value.decode().splitlines())
    return {name: int(number) for name, number in lines}


def reset_counters() -> None:
    """Forgets the calls so far."""
    _library().posing_reset_counters()


class _Stream:
    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = device

    def wait_event(self, event: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> "_Event":
        return event or _Event()


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.0


class _Properties:
    major, minor, name = 9, 0, "Posing GPU"
    multi_processor_count = 132
    total_memory = 80 << 30


def varlen_attn(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Any:
    """Stands in for torch's variable-length attention: refuses the same dtypes, and counts its calls."""
    import torch

    if {query.dtype, key.dtype, value.dtype} - {torch.bfloat16, torch.float16}:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        raise RuntimeError("query, key and value must have the same dtype")
    del cu_seq_k, max_q, max_k, window_size
    varlen_attn.calls += 1  # type: ignore[attr-defined]
    ends = _values(cu_seq_q)
    parts = []
    for first, last in itertools.pairwise(ends):
        q, k, v = (heads[first:last].transpose(0, 1)[None] for heads in (query, key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


varlen_attn.calls = 0  # type: ignore[attr-defined]


def _values(tensor: Any) -> list[int]:
    """The values of a device's tensor; a kernel reads them without the host, so that no wait is counted."""
    address = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_int32))
    return list(address[: tensor.numel()])


def install() -> None:
    """Makes torch find the posing devices of this process. `load` comes first."""
    import torch

    library = _library()
    devices = visible()
    capacity = int(os.environ.get(CAPACITY_VARIABLE, 80 << 30))
    library.posing_set_up(len(devices), ctypes.c_int64(capacity))
    cuda: Any = torch.cuda

    def index(device: Any = None) -> int:
        if device is None:
            return int(library.posing_device())
        if isinstance(device, int):
            return device
        found = torch.device(device).index
        return int(library.posing_device()) if found is None else found

    def set_device(device: Any) -> None:
        if index(device) >= len(devices):
            raise RuntimeError("CUDA error: invalid device ordinal")
        library.posing_set_device(index(device))

    def capacity_of(device: Any) -> int:
        return int(library.posing_capacity(index(device)))

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        if problem := os.environ.get(PROBLEM_VARIABLE):
            raise RuntimeError(problem)
        taken = int(os.environ.get(TAKEN_VARIABLE, 0))
        return capacity_of(device) - used_bytes(index(device)) - taken, capacity_of(device)

    answers = {
        "is_available": lambda: bool(devices),
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "device_count": lambda: len(devices),
        "current_device": index,
        "set_device": set_device,
        "mem_get_info": mem_get_info,
        "get_arch_list": lambda: ARCHES,
        "memory_allocated": lambda device=None: used_bytes(index(device)),
        "max_memory_allocated": lambda device=None: peak_bytes(index(device)),
        "reset_peak_memory_stats": lambda device=None: library.posing_reset_peak(index(device)),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": _Stream,
        "default_stream": _Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "get_device_capability": lambda device=None: tuple(
            map(int, os.environ.get(CAPABILITY_VARIABLE, "9.0").split("."))
        ),
        "get_device_name": lambda device=None: (
            os.environ.get(NAME_VARIABLE) or f"Posing GPU {devices[index(device)]}"
        ),
        "get_device_properties": lambda device=None: _Properties(),
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_rng_state_all": list,
        "_sleep": lambda cycles: None,
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    _replace_storage()
    _replace_nccl(devices)
    import torch.cuda.amp.common as amp

    amp.amp_definitely_not_available = lambda: False
    with contextlib.suppress(ImportError):
        import torch.nn.attention.varlen as varlen

        varlen.varlen_attn = varlen_attn  # type: ignore[assignment]


def _replace_storage() -> None:
    """Lets storages of devices be resized, which CPU builds of torch refuse."""
    import torch

    plain = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return plain(storage, size)
        _library().posing_resize(ctypes.c_void_p(storage._cdata), ctypes.c_int64(size))
        return storage

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def _replace_nccl(devices: list[str]) -> None:
    """Offers `nccl`, over gloo."""
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as groups

    class PosingNccl(dist.ProcessGroupGloo):  # type: ignore[misc]
        class Options:
            _timeout: Any = None

        def __init__(self, store: Any, rank: int, world: int, options: Any) -> None:
            store.set(f"device{rank}", devices[torch.cuda.current_device()])
            used = [store.get(f"device{other}").decode() for other in range(world)]
            for other, device in enumerate(used):
                first = used.index(device)
                if first != other:
                    raise dist.DistBackendError(
                        f"Duplicate GPU detected : rank {other} and rank {first} both on CUDA device {device}"
                    )
            super().__init__(store, rank, world, options._timeout)

    groups.ProcessGroupNCCL = PosingNccl  # type: ignore[misc]
    groups._NCCL_AVAILABLE = True
