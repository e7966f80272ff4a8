"""Formats forecasts of pools as a table for people, or as one JSON object."""

import io
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from astraflow.report.terminal_text import printable
from astraflow_paced.forecast.forecast import Forecast
from astraflow_paced.forecast.forecast_inputs import ForecastInputs

__all__ = ["show_forecasts"]

_WIDTH = 110
_COLUMNS = (
    "pool", "tokens/s", "steps/min", "staleness", "trainer waits", "rollouts wait", "cost/h", "cost/M tokens"
)  # fmt: skip


def show_forecasts(inputs: ForecastInputs, forecasts: Sequence[Forecast], *, as_json: bool) -> str:
    """Returns a text that ends with a line break. Staleness and waits are listed for each policy."""
    if as_json:
        whole = {"inputs": inputs.model_dump(), "pools": forecasts}
        return msgspec.json.encode(whole).decode() + "\n"
    table = Table(title="FORECAST under virtual time; nothing was run", title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "pool" else "right")
    for each in forecasts:
        policies = each.policies
        table.add_row(
            Text(printable(each.pool)),
            f"{each.tokens_per_s:,.0f}",
            ", ".join(f"{60 * policy.steps_per_s:.2f}" for policy in policies),
            ", ".join(f"{policy.staleness_mean:.2f} (max {policy.staleness_max})" for policy in policies),
            ", ".join(f"{policy.trainer_wait_frac:.0%}" for policy in policies),
            f"{each.rollout_wait_frac:.0%}",
            f"{each.cost_per_hour:.2f}",
            f"{each.cost_per_million:.3g}",
        )
    out = io.StringIO()
    Console(file=out, width=_WIDTH).print(table)
    names = ", ".join(policy.name for policy in forecasts[0].policies) if forecasts else ""
    lines = [f"pool {each.pool}: the bottleneck is {each.bottleneck}" for each in forecasts]
    if len(forecasts) > 0 and len(forecasts[0].policies) > 1:
        lines.append(f"policies, in this order: {names}")
    return out.getvalue() + "\n".join(map(printable, lines)) + "\n"
