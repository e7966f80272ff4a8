"""An evaluation as a table for people: narrow enough for a terminal of 80 columns."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from astraflow.algorithms.pass_at_k import Estimate
from astraflow.launch.evaluation import EvalReport, EvalScore

__all__ = ["evaluation_table"]


def evaluation_table(report: EvalReport) -> RenderableType:
    """One row a measure, a section a set; below, why episodes failed."""
    version = f" version {report.version}" if report.version >= 0 else ""
    title = f"{report.target}: {report.policy}{version}, temperature {report.temperature:g}"
    table = Table("set", "measure", "value", "95 % interval", "from")
    for score in report.sets:
        table.add_section()
        for idx, row in enumerate(_rows(score)):
            table.add_row(score.eval_set if idx == 0 else "", *row)
    told = [Text(_failures(score), "red") for score in report.sets if score.num_failed]
    return Group(Text(title), table, *told)


def _rows(score: EvalScore) -> list[tuple[str, str, str, str]]:
    measures: dict[str, Estimate | None] = {"pass@1": score.pass_at_1}
    measures[f"avg@{score.samples}"] = score.avg_at_k
    measures |= {f"pass@{k}": value for k, value in score.pass_at_k.items() if k > 1}
    sources = [
        f"{score.num_tasks} tasks x {score.samples}",
        f"{score.generated_tokens:,} tokens in {score.seconds:.1f} s",
    ]
    sources += [""] * len(measures)
    return [
        (name, f"{value.mean:.4f}", f"{value.low:.4f} - {value.high:.4f}", source)
        if value
        else (name, "-", "no episode has a score", source)
        for (name, value), source in zip(measures.items(), sources, strict=False)
    ]


def _failures(score: EvalScore) -> str:
    causes = ", ".join(f"{name} {count}" for name, count in sorted(score.failures.items()))
    return f"{score.eval_set}: {score.num_failed} episodes failed and are left out of all scores: {causes}"
