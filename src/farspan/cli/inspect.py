"""`farspan inspect`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from farspan.cli.console import (
    console,
    format_count,
    make_facts,
    make_table,
    print_json,
    print_line,
    print_notes,
)
from farspan.cli.options import AsJson, Model, Position, TrustRemoteCode

if TYPE_CHECKING:
    from farspan.workflows.inspect import Inspection, SeamCheck


def inspect_command(
    model: Model,
    as_json: AsJson = False,
    position: Position = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Compare the model's logits with and without farspan's attention function.",
        ),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show which position encoding each layer uses, and whether attention scales can be folded.

    The model is run on a few tokens, since its config can be wrong.
    """
    from farspan.progress import bars
    from farspan.workflows.inspect import inspect

    with bars() as progress:
        inspection = inspect(
            model,
            position=position,
            check=check,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    if as_json:
        print_json(inspection.to_json(), indent=2)
    else:
        show_inspection(inspection)


def show_inspection(inspection: Inspection) -> None:
    console.print(_facts(inspection))
    console.print()
    console.print(_layers(inspection))
    console.print()
    fold = inspection.fold
    answer = f"[green]yes[/], into {fold.site}" if fold.possible else "[yellow]no[/]"
    reason = f" ({escape(fold.why)})" if fold.why else ""
    console.print(f"[dim]scales can be folded:[/] {answer}{reason}")
    if inspection.cache:
        console.print()
        console.print(_cache(inspection))
    print_notes(inspection.warnings)
    if inspection.next_commands:
        console.print()
    for number, command in enumerate(inspection.next_commands):
        print_line(f"[dim]{'then' if number else 'next'}[/]  {escape(command)}")


def _cache(inspection: Inspection) -> Table:
    """The KV cache by type of layer."""
    lengths = [*inspection.cache[0].at]
    columns = [f"at {length // 1024}K" for length in lengths]
    table = make_table(f"KV cache, {inspection.dtype}", "layers", "per token", *columns, padding=3)
    for column in table.columns[1:]:
        column.justify = "right"
    rows = [
        (report.layer_type, report.layers, [report.per_token, *report.at.values()])
        for report in inspection.cache
    ]
    if len(rows) > 1:
        totals = [sum(sizes) for sizes in zip(*(row[2] for row in rows), strict=True)]
        rows.append(("all", sum(row[1] for row in rows), totals))
    for layer_type, count, sizes in rows:
        table.add_row(layer_type, str(count), *map(format_cache, sizes))
    return table


def format_cache(size: int) -> str:
    """131_072 -> "128 KiB"."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:.4g} {unit}"
    return f"{size} bytes"


def _facts(inspection: Inspection) -> Table:
    from farspan.workflows.inspect_summary import describe_other_layers

    heads = (
        f"{inspection.heads} query, {inspection.kv_heads} key/value, "
        f"dimension {inspection.head_dim}, base scale {inspection.base_scale:.4g}"
    )
    length = inspection.train_length
    facts = make_facts()
    facts.add_row(
        "family", f"{inspection.family}, {format_count(inspection.parameters)} parameters"
    )
    facts.add_row("heads", heads)
    facts.add_row("train length", f"{length:,} tokens" if length else "unknown")
    if inspection.other_layers:
        facts.add_row("without attention", describe_other_layers(inspection.other_layers))
    if inspection.rope:
        facts.add_row("rotation", inspection.rope)
    if inspection.query_norm:
        facts.add_row("query norm", inspection.query_norm)
    if inspection.temperature:
        facts.add_row("temperature", inspection.temperature)
    if inspection.seam_check:
        facts.add_row("attention seam", _describe_check(inspection.seam_check))
    return facts


def _describe_check(check: SeamCheck) -> str:
    change = max(check.uncached, check.cached)
    outcome = f"changes logits by {change:.2g} of the largest" if change else "changes no logit"
    return f"{outcome} ({check.tokens} tokens, with and without a cache)"


def _layers(inspection: Inspection) -> Table:
    from farspan.attention.describe import format_ranges

    columns = ["layers", "position encoding", "by config", "attention window"]
    heads = {layer: (layer.heads, layer.kv_heads, layer.head_dim) for layer in inspection.layers}
    unequal = len(set(heads.values())) > 1
    table = make_table(*columns, *["heads"] * unequal, padding=3)
    groups: dict[tuple[str, str, int | None, tuple[int, ...]], list[int]] = {}
    for layer in inspection.layers:
        key = (layer.position, layer.claimed, layer.window, heads[layer])
        groups.setdefault(key, []).append(layer.index)
    for (position, claimed, window, counts), indices in groups.items():
        color = "bold green" if position == "none" else "bold"
        agrees = claimed in (position, "unknown")
        table.add_row(
            format_ranges(indices),
            f"[{color}]{position}[/]",
            claimed if agrees else f"[yellow]{claimed}[/]",
            f"{window:,}" if window else "full",
            *["{} query, {} key/value, dimension {}".format(*counts)] * unequal,
        )
    return table
