"""A view as text: as many columns as the terminal has, and no more lines."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvoffload.client.insight import ServerInsight
from kvoffload.client.inspector import EngineSurvey
from kvoffload.metrics.labels import OUTCOMES, SMALLER
from kvoffload.protocol import LedgerKind
from kvoffload.top.ledger_rows import list_rows
from kvoffload.top.memory_worth import MemoryWorth, tell
from kvoffload.top.samples import Sample, TierLine, View
from kvoffload.units import GIB, KIB, MIB

_BAR = 24
_OUTCOMES = 4
_KINDS = 4
_SAVERS = 3
_TENANTS = 8
"""The largest; the others are one line."""


def draw(where: str, sample: Sample, view: View | None) -> RenderableType:
    if view is None:
        hint = f"; `kvoffload serve --set server={where}` starts one" if sample.fault.endswith("is not there") else ""
        return Text.assemble(
            (f"kvoffload  {where}\n", "bold"), ("no answer: ", "red"), sample.fault or "not yet", hint, overflow="fold"
        )
    return Group(
        Text.assemble(
            (f"kvoffload  {where}", "bold"),
            f"  {plural(view.stats.sessions, 'process', 'es')}, {plural(view.stats.namespaces, 'identit', 'ies', 'y')}",
        ),
        *([] if sample.survey is None else _draw_engines(sample.survey)),
        _draw_memory(view),
        _draw_requests(view),
        *([] if view.insight is None else [_draw_prompts(view, view.insight)]),
        *([] if view.insight is None or not view.insight.curve.hit_rates else [_draw_curve(view.insight)]),
        *([] if view.worth is None else _draw_worth(view.worth)),
        *([] if view.insight is None else _draw_savers(view.insight)),
        *([_draw_tiers(view)] if view.tiers else []),
        *([_draw_tenants(view)] if len(view.stats.tenants) > 1 else []),
    )


def size(count: float) -> str:
    """Short, for a column: three digits and a unit."""
    for unit, name in ((1024 * GIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}" if count / unit < 1000 else f"{count / unit:.0f} {name}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Short, for a line: a number and a unit."""
    unit_s, unit = next((one for one in ((3600, "h"), (60, "min")) if seconds >= one[0]), (1, "s"))
    return f"{number(seconds / unit_s)} {unit}"


def plural(count: int, word: str, many: str = "s", one: str = "") -> str:
    return f"{count:,} {word}{one if count == 1 else many}"


def number(count: float) -> str:
    return f"{count:,.1f}" if 0 < count < 10 and count % 1 else f"{count:,.0f}"


def _draw_memory(view: View) -> Text:
    stats, full = view.stats, round(view.fill * _BAR)
    color = "green" if view.fill < 0.9 else "yellow"
    why = SMALLER[stats.memory_reason].words if stats.memory_reason in SMALLER else "it grows"
    growth = f" ({size(stats.ready_bytes)} are there, {why})" if stats.ready_bytes < stats.capacity_bytes else ""
    return Text.assemble(
        "memory    ",
        ("█" * full, color),
        ("░" * (_BAR - full), "dim"),
        f" {view.fill:.0%} of {size(stats.capacity_bytes)}{growth}, {plural(stats.readable, 'block')}, "
        f"{plural(stats.leases, 'lease')}, {plural(stats.reserved, 'slot')} held ready",
    )


def _draw_requests(view: View) -> Text:
    share = "no requests" if view.hit_rate is None else f"{view.hit_rate:.1%} hit"
    rates = ", ".join(f"{number(view.rates[name])} {name}" for name in ("hits", "misses", "evicted", "refused"))
    return Text(f"requests  {share}; a second: {rates}")


def _draw_prompts(view: View, insight: ServerInsight) -> Text:
    """Draws the outcomes of tokens between two samples, the most frequent first; or since the server's start, if no
    tokens were asked for in between."""
    per_second = any(view.outcomes.values())
    shown = view.outcomes if per_second else insight.outcomes
    rows = sorted(((count, name) for name, count in shown.items() if count), reverse=True)[:_OUTCOMES]
    line = ", ".join(f"{number(count)} {_say(name)}" for count, name in rows) or "nothing was asked yet"
    ceiling = "" if insight.told_ceiling is None else f"; with endless memory: {insight.told_ceiling:.1%} of blocks"
    return Text(f"tokens    {'a second' if per_second else 'so far'}: {line}{ceiling}")


def _draw_engines(survey: EngineSurvey) -> Iterator[Text]:
    """Draws which engines have joined, and a line for each pair that shares no blocks, with the settings that
    differ."""
    rows = survey.list_kinds()
    told = [
        f"{row['engine'] or 'of an unknown kind'} {row['model']}".rstrip()
        + f" ({plural(row['sessions'], 'session')}, {plural(row['processes'], 'process', 'es')})"
        for row in rows[:_KINDS]
    ]
    if len(rows) > _KINDS:
        told.append(f"{len(rows) - _KINDS} more kinds")
    if told:
        yield Text(f"engines   {', '.join(told)}", overflow="fold")
    for line in survey.find_differing():
        yield Text.assemble(("engines   share no blocks: ", "red"), line, overflow="fold")


def _draw_curve(insight: ServerInsight) -> Text:
    rates = (f"{share:.1%} with {memory:g}x" for memory, share in insight.curve.hit_rates.items())
    return Text(f"hits      {', '.join(rates)} the memory")


def _draw_worth(worth: MemoryWorth) -> Iterator[Text]:
    """Draws a sentence about less memory and one about more: about the size of each kind that brings the most."""
    for sizes in ([one for one in worth.sizes if one.memory < 1], [one for one in worth.sizes if one.memory > 1]):
        if sizes:
            best = max(sizes, key=lambda one: one.saved_s if one.price is None else one.price)
            yield Text(f"memory    {tell(best, worth.span_s)}", overflow="fold")


def _draw_savers(insight: ServerInsight) -> Iterator[Text]:
    """Draws which tenants saved the most prefill, if there are any."""
    rows = [row for row in list_rows(insight, LedgerKind.TENANT) if row["saved_s"]]
    if any(row["name"] for row in rows):
        shown = ", ".join(f"{duration(row['saved_s'])} {_name_tenant(row['name'])}" for row in rows[:_SAVERS])
        rest = sum(row["saved_s"] for row in rows[_SAVERS:])
        yield Text(f"saved     {shown}{f', {duration(rest)} others' if rest else ''}", overflow="fold")


def _name_tenant(name: str | None) -> str:
    return "others" if name is None else name or "without a tenant"


def _say(outcome: str) -> str:
    """A newer server's outcome has its name."""
    return OUTCOMES[outcome].words if outcome in OUTCOMES else outcome.replace("_", " ")


def _draw_tiers(view: View) -> Group:
    """Draws a row for each tier, and below the table the full text of each tier's fault while it lasts."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("tier", no_wrap=True)
    table.add_column("used", justify="right", min_width=10)  # gives way to the others where the terminal is narrow
    for name in ("written/s", "read/s", "late/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", overflow="ellipsis", no_wrap=True)
    faults = []
    for tier in view.tiers:
        state, colon, why = tier.state.partition(": ")
        table.add_row(tier.name, _used(tier), *_moved(tier), Text(state, "" if state == "ready" else "red"))
        if colon:
            faults.append(Text.assemble((f"{tier.name} is {state}: ", "red"), why, overflow="fold"))
    return Group(table, *faults)


def _used(tier: TierLine) -> str:
    used = f"{size(tier.used_bytes)} of {size(tier.capacity_bytes)}" if tier.capacity_bytes else size(tier.used_bytes)
    if tier.coded_ratio is None:
        return used
    share = "" if tier.coded_share is None else f"{tier.coded_share:.0%} "
    return f"{used}, {share}coded {tier.coded_ratio:.2f} x"


def _moved(tier: TierLine) -> tuple[str, str, str]:
    rates = tier.rates
    return (
        size(rates.get("written_bytes", 0.0)),
        size(rates.get("promoted_bytes", 0.0)),
        number(rates.get("late", 0.0)),
    )


def _draw_tenants(view: View) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("tenant", overflow="ellipsis", no_wrap=True)
    table.add_column("used", justify="right", no_wrap=True)
    table.add_column("quota", justify="right", no_wrap=True)
    tenants = sorted(view.stats.tenants, key=lambda one: one.used_bytes, reverse=True)
    for one in tenants[:_TENANTS]:
        table.add_row(
            one.name or "without a tenant", size(one.used_bytes), size(one.quota_bytes) if one.quota_bytes else ""
        )
    rest = tenants[_TENANTS:]
    if rest:
        table.add_row(f"{len(rest)} more", size(sum(one.used_bytes for one in rest)), "")
    return table
