"""A simulated trainer and its supervisor: sessions that take, train, publish, commit and release, and die."""

from collections.abc import Generator
from typing import Any

from astraflow.errors import FencedError, RefusedError
from drivers.core_driver import make_chunk_manifest
from simulator.clock import Ask, Link, Process, Signal, World
from simulator.referee import Referee
from simulator.scenario import POLL_S, Scenario

__all__ = ["Trainer"]


class Trainer:
    """One policy's trainer: keeps its durable checkpoint, and starts a session after each death."""

    def __init__(
        self, world: World, scenario: Scenario, referee: Referee, policy: str, *, step_s: float = 0.0
    ) -> None:
        """`step_s`: how long a training step takes; 0: at random, about a second."""
        self._world, self._scenario, self._referee = world, scenario, referee
        self.policy, self.step_s = policy, step_s
        self.durable_step = 0
        self.num_sessions = 0
        self.start()

    def start(self) -> None:
        """Begins a session from the durable checkpoint, whatever others are still at work."""
        self.num_sessions += 1
        name = f"{self.policy}#{self.num_sessions}"
        self.session = _Session(self._world, self._scenario, self._referee, self, name)

    def kill(self, down_s: float) -> None:
        """The process dies and is started again."""
        self._world.tell("trainer %s dies", self.session.link.name)
        self.session.kill()
        self._world.after(down_s, self._restart, self.session)

    def ended(self, session: "_Session", *, is_fenced: bool) -> None:
        """A session ended by itself; if it was fenced by mistake, another one follows."""
        if is_fenced and session is self.session:
            self._world.after(1.0 + self._world.rng.random(), self._restart, session)

    def _restart(self, session: "_Session") -> None:
        if session is self.session:
            self.start()


class _Session:
    """One life of the trainer's process. Trains one step ahead of its publication, as the real one does."""

    def __init__(
        self, world: World, scenario: Scenario, referee: Referee, trainer: Trainer, name: str
    ) -> None:
        self._world, self._scenario, self._referee, self._trainer = world, scenario, referee, trainer
        self._policy, self._durable_step = trainer.policy, trainer.durable_step
        self._num_steps = 0
        self.link = Link(name, latency_s=0.002)
        self._has_settled = Signal()
        self._publication: Process | None = None
        self._processes = [world.spawn(self._work())]
        world.tell("trainer %s starts from step %d", name, trainer.durable_step)

    def kill(self) -> None:
        """Ends it without a word."""
        for process in self._processes:
            process.kill()

    def _call(self, method: str, *args: Any, timeout_s: float = 4.0) -> Generator[Any, Any, Any]:
        """The answer, however often it takes to ask; the run's end and a fence end the session."""
        while True:
            reply = yield Ask(self.link, method, (self._policy, *args), timeout_s)
            if isinstance(reply, RefusedError) and (method, reply.code) == ("batch", "finished"):
                return "finished"  # The publication in flight goes on.
            if isinstance(reply, RefusedError):
                self._refused(method, args, reply)
                return None
            if reply is not None:
                return reply
            yield 0.2 + self._world.rng.random()

    def _refused(self, method: str, args: tuple[Any, ...], refusal: RefusedError) -> None:
        is_fenced = isinstance(refusal, FencedError)
        if refusal.code == "batches_released" and self._durable_step < self._trainer.durable_step:
            is_fenced = True  # Another session went on while this one's first request was on its way.
        if not is_fenced and refusal.code != "finished":
            self._referee.problem(f"trainer {self.link.name}: {method}{args} is refused: {refusal}")
        self.kill()
        self._trainer.ended(self, is_fenced=is_fenced)

    def _work(self) -> Generator[Any, Any, None]:
        rng = self._world.rng
        durable_step = self._durable_step
        session = yield from self._call("attach", self.link.name, durable_step)
        if session is None:
            return
        self._epoch, self._base = session.epoch, session.next_version - session.step
        self._num_steps = session.num_steps
        yield 0.1 + rng.random()
        if (yield from self._publish(durable_step, is_first=True)) is None:
            return
        for step in range(durable_step, self._num_steps):
            view = None
            while view is None:
                view = yield from self._call("batch", self._epoch, step, timeout_s=POLL_S + 4.0)
                if view is None or view in ("finished", "failed"):
                    return
                view = None if view == "running" else view
            yield self._trainer.step_s or 0.2 + rng.expovariate(1.0)
            while self._publication is not None and self._publication.is_alive:
                yield self._has_settled
            self._publication = self._world.spawn(self._publish_step(step))
            self._processes.append(self._publication)

    def _publish(self, step: int, *, is_first: bool) -> Generator[Any, Any, Any]:
        version = self._base + step
        is_delta = not is_first and self._world.rng.random() < 0.7
        manifest = make_chunk_manifest(
            self._policy,
            version,
            kind="delta" if is_delta else "full",
            base=version - 1 if is_delta else -1,
            has_files=is_first,
        )
        return (yield from self._call("publish", self._epoch, step, manifest))

    def _publish_step(self, step: int) -> Generator[Any, Any, None]:
        yield from self._publish_and_commit(step)
        self._world.after(0.0, self._has_settled.fire)

    def _publish_and_commit(self, step: int) -> Generator[Any, Any, None]:
        if (yield from self._publish(step + 1, is_first=False)) is None:
            return
        if (yield from self._call("commit", self._epoch, step, self._base + step + 1)) is None:
            return
        self._referee.committed(self._policy, step)
        done = step + 1
        if done % self._scenario.checkpoint_every and done < self._num_steps:
            return
        yield self._world.rng.random()
        self._trainer.durable_step = max(self._trainer.durable_step, done)
        yield from self._call("release", self._epoch, done)
