"""`farspan extend`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from farspan.cli.choices import PRESETS, complete, complete_method
from farspan.cli.console import (
    console,
    make_facts,
    make_table,
    note,
    print_json,
    print_line,
    print_notes,
    print_saved,
)
from farspan.cli.options import (
    AsJson,
    Bos,
    Device,
    DeviceMap,
    DryRun,
    Model,
    Position,
    TrainLength,
    TrustRemoteCode,
    out_option,
    overrides_argument,
    parse_data,
)
from farspan.files import check_absent
from farspan.progress import format_duration
from farspan.signals import stoppable

if TYPE_CHECKING:
    from farspan.attention.patch import Patch
    from farspan.workflows.extend import ExtendEstimate, ExtendResult


Target = Annotated[
    str, typer.Option("--to", metavar="LENGTH", help="Target length in tokens, e.g. 2048 or 16k.")
]
Method = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Attention scales: uniform, headscale, headlog, piecewise, logn, llama4, ssmax. "
        "RoPE: pi, ntk, dynamic-ntk, yarn, drope. Weights: swan, continue. Two can be joined, e.g. "
        "yarn+headscale. auto tries those that suit the model and keeps the best.",
        autocompletion=complete_method,
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="One text (file, folder, Hub data set), split in three; or three texts: search=PATH, "
        "choose=PATH, report=PATH.",
        show_default="python-docs/search",
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="quick: minutes for a small model on a CPU (searches of at most 50 steps, 4 windows "
        "to choose by, 4 to report on, 10 passkeys at each length); full: 200 steps, 8, 8, 20.",
        show_default="quick on a CPU, else full",
        autocompletion=complete(PRESETS),
    ),
]
RecipeName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Recipe: default, or a .toml file.", show_default=False),
]


def extend_command(
    model: Model,
    to: Target,
    out: Annotated[
        Path | None,
        out_option("New folder for the patch.", show_default="MODEL-LENGTH, as nope-twin-1024"),
    ] = None,
    overrides: Annotated[list[str] | None, overrides_argument("search.steps=50")] = None,
    method: Method = "auto",
    preset: Preset = None,
    data: Data = None,
    recipe: RecipeName = None,
    dry_run: DryRun = False,
    device: Device = None,
    as_json: AsJson = False,
    train_length: TrainLength = None,
    position: Position = None,
    bos: Bos = "auto",
    device_map: DeviceMap = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Extend the context of a model: fit a method and write a patch.

    Verifies the patch on a freshly loaded model, and reports loss and passkeys before and after.
    Rerun the same command to resume.
    """
    from farspan.progress import bars
    from farspan.workflows.extend import DEFAULT_TEXT, estimate_extension, extend

    options: dict[str, Any] = {
        "preset": preset,
        "data": parse_data(data) if data else DEFAULT_TEXT,
        "recipe": recipe,
        "overrides": overrides or [],
        "train_length": train_length,
        "position": position,
        "bos": bos,
        "device": device,
        "device_map": device_map,
        "trust_remote_code": trust_remote_code,
    }
    where = out or "the patch folder"
    with stoppable(f"nothing was written to {where} yet"), bars() as progress:
        if dry_run:
            if out is not None:
                check_absent(out)
            estimate = estimate_extension(model, to, method, progress=progress, **options)
        else:
            extension = extend(model, to, out, method, progress=progress, say=note, **options)
    if dry_run:
        show_estimate(estimate, as_json)
        return
    if as_json:
        print_json(extension.to_dict())
    else:
        show_extension(extension)


def show_estimate(estimate: ExtendEstimate, as_json: bool) -> None:
    if as_json:
        print_json(estimate.to_dict())
        return
    facts = make_facts()
    if estimate.is_auto:
        facts.add_row("auto tries", ", ".join(estimate.methods))
    else:
        facts.add_row("method", "+".join(estimate.methods))
    splits = ", ".join(f"{count:,} to {name}" for name, count in estimate.text.items())
    facts.add_row("text", f"tokens: {splits}")
    if estimate.tokens:
        epochs = estimate.tokens / estimate.text["search"]
        facts.add_row(
            "distillation",
            f"on {estimate.tokens:,} tokens in {estimate.steps:,} steps: {epochs:.1f} epochs, "
            f"{estimate.flops:.2g} FLOP",
        )
    facts.add_row("time", estimate.sentence)
    for stage, seconds in estimate.stages.items():
        facts.add_row("", f"{stage.removesuffix(' lr')}: {format_duration(seconds)}")
    console.print(facts)
    print_notes(estimate.notes)


def show_extension(extension: ExtendResult) -> None:
    print_notes(extension.notes)
    _show_patch(extension.patch)
    _show_details(extension)
    console.print()
    console.print(_table(extension))
    console.print()
    print_line(
        f"[dim]verified on a freshly loaded model: the patch changes logits by up to "
        f"{extension.effect:.2g} and matches the fitted model within {extension.proof:.2g}[/]"
    )
    print_saved("patch", extension.folder)


def _show_patch(patch: Patch) -> None:
    import torch

    from farspan.attention.describe import describe_layout, describe_rope

    if patch.scales is not None:
        scales = patch.scales.used(patch.scales.at(torch.tensor([patch.target])))
        length = f"at {patch.target:,} keys" if patch.scales.slope is not None else "at any length"
        low, high = f"{scales.min():.2f}", f"{scales.max():.2f}"
        spread = low if low == high else f"{low} to {high}, mean {scales.mean():.2f}"
        count = len(patch.scales.layers)
        heads = f"{scales.numel()} heads in {count} layer{'s' * (count > 1)}"
        console.print(f"[dim]attention scale λ̂[/] {spread} {length}, {heads}")
    if patch.rope is not None:
        console.print(f"[dim]RoPE[/] {escape(describe_rope(patch.rope))}")
    if patch.layout is not None:
        console.print(f"[dim]layout[/] {escape(describe_layout(patch.layout))}")


def _show_details(extension: ExtendResult) -> None:
    """What the method chose, what it trained on, and what it saves."""
    if choice := extension.details.get("choice"):
        print_line(f"[dim]choice[/] {escape(choice)}")
    for search in extension.details.get("searches", ()):
        passkeys = f"; passkeys in {search['passkeys']:.0%} of the windows"
        print_line(
            f"[dim]{search['method']}, learning rate {search['lr']:g}[/] {search['end']}"
            f"{passkeys if search['passkeys'] else ''}"
        )
    for key, done in (("distillation", "distilled on"), ("long_windows", "then also on")):
        if plan := extension.details.get(key):
            size = f"{plan['steps']:,} steps of {plan['batch']} windows of {plan['length']:,}"
            print_line(f"[dim]{done}[/] {plan['tokens']:,} tokens: {size}")
    before, after = extension.cache["before"], extension.cache["after"]
    if after["at_target"] < before["at_target"]:
        less = before["at_target"] / after["at_target"]
        print_line(
            f"[dim]KV cache at {extension.patch.target:,} tokens[/] "
            f"{before['at_target'] / 2**20:.1f} MiB before, {after['at_target'] / 2**20:.1f} MiB "
            f"after ({less:.1f} times less); a further token adds {before['per_token']:,} bytes "
            f"before, {after['per_token']:,} after"
        )


def _table(extension: ExtendResult) -> Table:
    before, after = extension.before, extension.after
    with_passkeys = any("passkey" in name for name in before)
    passkeys = "; passkey: share retrieved" if with_passkeys else ""
    table = make_table("", padding=3, caption=f"loss in nats{passkeys}")
    lengths = sorted({int(name.partition("@")[2]) for name in before})
    for length in lengths:
        table.add_column(f"@{length}", justify="right")
    for metric, digits in (("loss", 3), ("passkey", 2)):
        for row, values in (("before", before), ("after", after)):
            measured = [values.get(f"{metric}@{length}") for length in lengths]
            if any(value is not None for value in measured):
                cells = ["" if value is None else f"{value:.{digits}f}" for value in measured]
                table.add_row(f"{metric} {row}", *cells, style="bold" if row == "after" else "")
    return table
