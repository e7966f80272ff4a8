"""Checks a dataflow: the kit acts as its rollout services and trainers.

The check uses up the run under test. Use a fresh run with a policy to train, at least four steps, and a short
`lease_timeout_s`. Scenarios are independent: the kit answers everything that a scenario leaves open before
the next one starts. A candidate that breaks one rule is therefore reported only for that rule.
"""

import logging
from collections.abc import Awaitable, Callable

from astraflow.service.client import Transport
from astraflow_conformance import dataflow_trainers as trainers
from astraflow_conformance import dataflow_workers as workers
from astraflow_conformance.dataflow_progress import progress
from astraflow_conformance.probe_client import ProbeClient, RefusalError
from astraflow_conformance.report import AbandonedError, BrokenError, Checks, Report
from astraflow_conformance.rules import RULES
from astraflow_conformance.run_under_test import RunUnderTest

__all__ = ["check_dataflow"]

_log = logging.getLogger(__name__)
_Scenario = Callable[[RunUnderTest], Awaitable[None]]

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
    (progress, "D34"),
    (trainers.fencing, "D20"),
    (trainers.batches, "D24"),
    (trainers.commits, "D27"),
    (trainers.releasing, "D28"),
    (trainers.accounting, "D30"),
)
"""The scenarios in order, each with the rule that is broken if a request fails that must succeed."""


async def check_dataflow(
    transport: Transport,
    *,
    name: str,
    token: str = "",
    restart: Callable[[], Awaitable[None]] | None = None,
    is_quick: bool = False,
) -> Report:
    """Checks the dataflow behind `transport`. Returns the verdict on each rule.

    `restart`: kills the dataflow with SIGKILL and starts it again; without it, the rule about crashes isn't
    checked. `is_quick`: leaves out the rules for which a lease must expire.
    """
    checks = Checks(rule for rule in RULES if rule.startswith("D"))
    run = RunUnderTest(ProbeClient(transport, checks, token=token), checks)
    try:
        await run.meet()
    except BrokenError:
        return checks.report("dataflow", name)
    for scenario, rule in _SCENARIOS:
        await _play(run, scenario, rule)
    if is_quick:
        checks.skip("D15", "left out: it takes a lease's timeout")
        checks.skip("D16", "left out: it takes a lease's timeout")
    else:
        await _play(run, workers.expiry, "D15")
    if restart is None:
        checks.skip("D29", "only a dataflow that the kit starts itself can be killed")
    else:
        crash = restart
        await _play(run, lambda run: trainers.crash(run, crash), "D29")
    await _play(run, trainers.ending, "D32")
    return checks.report("dataflow", name)


async def _play(run: RunUnderTest, scenario: _Scenario, rule: str) -> None:
    """Runs one scenario. If a request that must succeed is refused, the scenario's rule is broken."""
    try:
        await scenario(run)
    except BrokenError as err:
        _log.info("%s", err)
    except RefusalError as err:
        run.checks.broke(rule, str(err))
    except AbandonedError as err:
        # A rule that is already broken may be the cause, so this scenario's rule isn't blamed then.
        if not any(run.checks.is_broken(known) for known in RULES if known.startswith("D")):
            run.checks.broke(rule, str(err))
    try:
        await run.settle()
        await run.make_room()
    except (AbandonedError, RefusalError) as err:
        _log.info("what was left undone stays so: %s", err)
