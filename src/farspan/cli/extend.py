"""`farspan extend`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from farspan.cli.console import (
    console,
    make_table,
    print_json,
    print_line,
    print_notes,
    print_saved,
)
from farspan.cli.options import (
    AsJson,
    BaseModel,
    Device,
    Position,
    TrainLength,
    TrustRemoteCode,
    out_option,
    overrides_argument,
    parse_data,
)
from farspan.signals import stoppable

if TYPE_CHECKING:
    from farspan.attention.patch import Patch
    from farspan.workflows.extend import ExtendResult


Target = Annotated[
    str, typer.Option("--to", metavar="LENGTH", help="Target length in tokens, e.g. 2048 or 16k.")
]
Method = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Attention scales: uniform, headscale, headlog, piecewise, logn, llama4, ssmax. "
        "RoPE: pi, ntk, dynamic-ntk, yarn, drope. Two can be joined, e.g. yarn+headscale. "
        "auto tries those that suit the model and keeps the best.",
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="One text, split in three; or three texts: search=PATH, choose=PATH, report=PATH.",
        show_default="python-docs/search",
    ),
]
RecipeName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Recipe: default, or a .toml file.", show_default=False),
]


def extend_command(
    model: BaseModel,
    to: Target,
    out: Annotated[Path, out_option("New folder for the patch.")],
    overrides: Annotated[list[str] | None, overrides_argument("search.steps=50")] = None,
    method: Method = "auto",
    data: Data = None,
    recipe: RecipeName = None,
    device: Device = None,
    as_json: AsJson = False,
    train_length: TrainLength = None,
    position: Position = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Extend the context of a model: fit a method and write a patch.

    Verifies the patch on a freshly loaded model, and reports loss and passkeys before and after.
    """
    from farspan.lengths import parse_length
    from farspan.progress import bars
    from farspan.workflows.extend import DEFAULT_TEXT, extend

    with stoppable(f"nothing was written to {out} yet"), bars() as progress:
        extension = extend(
            model,
            parse_length(to),
            out,
            method,
            data=parse_data(data) if data else DEFAULT_TEXT,
            recipe=recipe,
            overrides=overrides or [],
            train_length=train_length,
            position=position,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    if as_json:
        print_json(
            {
                "patch": extension.patch.describe(),
                "before": extension.before,
                "after": extension.after,
                "folder": str(out),
            }
        )
    else:
        show_extension(extension)


def show_extension(extension: ExtendResult) -> None:
    print_notes(extension.notes)
    _show_patch(extension.patch)
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

    from farspan.workflows.inspect import describe_rope

    if patch.scales is not None:
        scales = patch.scales.at(torch.tensor([patch.target])).flatten()
        length = f"at {patch.target:,} keys" if patch.scales.slope is not None else "at any length"
        low, high = f"{scales.min():.2f}", f"{scales.max():.2f}"
        spread = low if low == high else f"{low} to {high}, mean {scales.mean():.2f}"
        heads = f"{scales.numel()} heads in {len(patch.scales.layers)} layers"
        console.print(f"[dim]attention scale λ̂[/] {spread} {length}, {heads}")
    if patch.rope is not None:
        console.print(f"[dim]RoPE[/] {escape(describe_rope(patch.rope))}")


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
