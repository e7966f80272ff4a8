"""Drives a dataflow through the protocol: the kit plays its rollout services and trainers.

The run under test is used up: give it a fresh one with a policy to train, at least four steps, and a short
`lease_timeout_s`. Scenarios stand for themselves: what one breaks is answered before the next begins, so that
a candidate that breaks one rule is told of that rule alone.
"""

import logging
from collections.abc import Awaitable, Callable

from astraflow.service.client import Transport
from astraflow_conformance import dataflow_trainers as trainers
from astraflow_conformance import dataflow_workers as workers
from astraflow_conformance.desk import Desk, RefusalError
from astraflow_conformance.report import AbandonedError, BrokenError, Checks, Report
from astraflow_conformance.rules import RULES
from astraflow_conformance.stage import Stage

__all__ = ["check_dataflow"]

_log = logging.getLogger(__name__)
_Scenario = Callable[[Stage], Awaitable[None]]

_SCENARIOS: tuple[tuple[_Scenario, str], ...] = (
    (workers.joining, "D4"),
    (trainers.publishing, "D21"),
    (workers.lag, "D9"),
    (workers.pinned, "D19"),
    (workers.results, "D11"),
    (workers.failures, "D14"),
    (workers.unsound, "D13"),
    (workers.drain, "D17"),
    (workers.lost_answer, "D18"),
    (workers.strangers, "D33"),
    (trainers.fencing, "D20"),
    (trainers.batches, "D24"),
    (trainers.commits, "D27"),
    (trainers.releasing, "D28"),
    (trainers.accounting, "D30"),
)
"""In this order; the rule that is blamed where a request fails that must not."""


async def check_dataflow(
    transport: Transport,
    *,
    name: str,
    token: str = "",
    restart: Callable[[], Awaitable[None]] | None = None,
    is_quick: bool = False,
) -> Report:
    """Drives the dataflow behind `transport`; returns what became of each rule.

    `restart` kills the dataflow with -9 and starts it again; without it the rule about crashes is not
    checked. `is_quick` leaves out what takes waiting out a lease's timeout.
    """
    checks = Checks(rule for rule in RULES if rule.startswith("D"))
    stage = Stage(Desk(transport, checks, token=token), checks)
    try:
        await stage.meet()
    except BrokenError:
        return checks.report("dataflow", name)
    for scenario, rule in _SCENARIOS:
        await _play(stage, scenario, rule)
    if is_quick:
        checks.skip("D15", "left out: it takes a lease's timeout")
        checks.skip("D16", "left out: it takes a lease's timeout")
    else:
        await _play(stage, workers.expiry, "D15")
    if restart is None:
        checks.skip("D29", "only a dataflow that the kit starts itself can be killed")
    else:
        crash = restart
        await _play(stage, lambda stage: trainers.crash(stage, crash), "D29")
    await _play(stage, trainers.ending, "D32")
    return checks.report("dataflow", name)


async def _play(stage: Stage, scenario: _Scenario, rule: str) -> None:
    """One scenario; a refusal of what must not be refused breaks its rule."""
    try:
        await scenario(stage)
    except BrokenError as err:
        _log.info("%s", err)
    except RefusalError as err:
        stage.checks.broke(rule, str(err))
    except AbandonedError as err:
        if not any(stage.checks.is_broken(known) for known in RULES if known.startswith("D")):
            stage.checks.broke(rule, str(err))
    try:
        await stage.settle()
        await stage.make_room()
    except (AbandonedError, RefusalError) as err:
        _log.info("what was left undone stays so: %s", err)
