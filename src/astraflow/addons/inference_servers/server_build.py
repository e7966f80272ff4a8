"""Refuses a server that this machine can't run: a build for CPUs on a machine with an NVIDIA GPU, a version
that was never tested, and a build for a CUDA that the driver doesn't run."""

from collections import Counter
from collections.abc import Mapping

import msgspec

from astraflow.addons.inference_servers import build_report
from astraflow.addons.inference_servers.build_report import OLDEST_DRIVERS, driver_version, gpu_found
from astraflow.addons.inference_servers.server_process import server_environment, server_program
from astraflow.errors import ConfigError
from astraflow.processes.visible_gpus import VISIBLE
from astraflow.user_input.interpreters import ask_program, last_line

__all__ = ["check_build"]

_REMEDY = (
    "build it for this machine's GPU and driver, e.g. `rm -rf .venv-vllm && make .venv-vllm`, or with pip as "
    "in docs/models.md#engines"
)


class _Build(msgspec.Struct, frozen=True):
    """What a Python says about its server."""

    version: str = ""
    torch: str = ""
    cuda: str = ""
    hip: str = ""
    """Versions of CUDA or ROCm that it was built for; empty without."""
    gpus: tuple[str, ...] = ()
    problem: str = ""
    """Why it can't use a GPU, or load its own libraries."""
    driver_cuda: int = 0
    """Newest major version of CUDA that the driver's library runs; 0 if it can't be loaded."""

    def text(self, library: str) -> str:
        """Returns e.g. `vllm 0.32.0 with torch 2.13.0 for CUDA 13.0 on 8 x NVIDIA H100`."""
        gpus = " and ".join(f"{num} x {name}" for name, num in Counter(self.gpus).items())
        kind = f"CUDA {self.cuda}" if self.cuda else f"ROCm {self.hip}" if self.hip else "CPUs"
        return f"{library} {self.version} with torch {self.torch} for {kind}{f' on {gpus}' if gpus else ''}"


def check_build(name: str, *, library: str, tested: str, env: Mapping[str, str]) -> str:
    """Asks the Python of an engine's server which server it has, and checks whether it can run here.

    `tested`: the version that was tested, without its last part.
    Raises: ConfigError if it can't.
    """
    where = f"rollout.engine.python = {name!r}"
    variables = server_environment(env)
    try:
        answer = ask_program([server_program(name), build_report.__file__, library], env=variables)
    except OSError as err:
        raise ConfigError(
            f"{where} cannot be run: {err.strerror}; expected the Python of an environment that has "
            f"{library} installed"
        ) from err
    try:
        build = msgspec.json.decode(last_line(answer.stdout), type=_Build)
    except msgspec.DecodeError as err:
        reason = last_line(answer.stderr) or f"exit code {answer.returncode}"
        raise ConfigError(f"{where} can't say which {library} it has: {reason}; {_REMEDY}") from err
    if not build.version:
        raise ConfigError(f"{where} has no {library}; {_REMEDY}, or name another Python")
    if problem := _problem(build, tested, is_hidden=variables.get(VISIBLE) in {"", "-1"}):
        raise ConfigError(f"{where} has {build.text(library)}, but {problem}; {_REMEDY}")
    return build.text(library)


def _problem(build: _Build, tested: str, *, is_hidden: bool) -> str:
    """Returns why a build can't serve here; empty if it can. `is_hidden`: no GPU is visible to it."""
    if not f"{build.version}.".replace("+", ".").startswith(f"{tested}."):
        return (
            f"only {tested} was tested. Install that, or start your own server at your own risk and name it "
            "in rollout.engine.attach.url"
        )
    driver = driver_version()
    if not (build.cuda or build.hip) or "+cpu" in build.version:
        gpu = "" if is_hidden else gpu_found()
        return gpu and (
            f"this machine has an NVIDIA GPU ({gpu}, driver {driver or 'unknown'}), which a build for CPUs "
            f'leaves idle. To compute on CPUs all the same, set rollout.engine.env.{VISIBLE}: ""'
        )
    major = int(build.cuda.partition(".")[0] or 0)
    runs = build.driver_cuda or (build_report.newest_cuda(driver) if driver else major)
    if runs < major:
        oldest = OLDEST_DRIVERS.get(major, f"above {max(OLDEST_DRIVERS.values())}")
        return (
            f"this machine's NVIDIA driver {driver} runs CUDA {runs or 11} at most, and CUDA {major} needs "
            f"driver {oldest} or newer. Update the driver, or use a build for an older CUDA"
        )
    hidden = f", since {VISIBLE} hides them" if is_hidden else ""
    return build.problem or ("" if build.gpus else f"it finds no GPU{hidden}")
