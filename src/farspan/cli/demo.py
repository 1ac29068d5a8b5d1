"""`farspan demo`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from farspan.cli.console import console, make_table, print_line
from farspan.cli.diagnose import show_diagnoses
from farspan.cli.extend import show_extension

if TYPE_CHECKING:
    from farspan.workflows.demo import FarReading


def demo_command() -> None:
    """Extend a small bundled model from 512 to 1,024 tokens, and read 16,384 with another one.

    Takes minutes on a CPU.
    """
    from farspan.progress import bars
    from farspan.workflows import demo

    folder = demo.unused_folder(Path("runs/demo"))
    with bars() as progress:
        _heading("1 · diagnose", "why does nope-twin fail beyond 512 tokens?")
        show_diagnoses([demo.diagnose_model(progress)], demo.LENGTHS)
        console.print()
        _heading("2 · extend", "one scale λ̂ for all heads (method uniform)")
        uniform = demo.extend_uniform(folder, progress)
        show_extension(uniform)
        console.print()
        _heading(
            "3 · extend", "one scale λ̂ per head (method headscale, only 20 steps of 2 windows)"
        )
        headscale = demo.extend_headscale(folder, uniform, progress)
        show_extension(headscale)
        console.print()
        _heading("4 · SWAN", "rope-twin, converted by method swan (the bundled swan-twin)")
        reading = demo.read_far(folder / "headscale", progress)
        _show_far(reading)
    far_figure = demo.draw_far_figure(folder, reading)
    figure = demo.draw_figure(folder, {"uniform": uniform, "headscale, reduced": headscale})
    before, after = uniform.before, headscale.after
    console.rule(style="dim")
    print_line(
        f"At 1,024 tokens the loss fell by {before['loss@1024'] - after['loss@1024']:.2f} nats. "
        f"Passkey retrieval there, which sharper attention can harm, changed from "
        f"{before['passkey@1024']:.2f} to {after['passkey@1024']:.2f}. "
        f"The figure is [bold]{escape(str(figure))}[/]."
    )
    print_line(
        f"SWAN, also trained on 512 tokens, reads all 16,384 and retrieves "
        f"{round(demo.FAR_PASSKEYS * reading.passkey)} of {demo.FAR_PASSKEYS} passkeys among them. "
        f"The figure is [bold]{escape(str(far_figure))}[/]."
    )


def _show_far(reading: FarReading) -> None:
    """The loss of each model before some positions."""
    marks = (512, 1024, 4096, 16384)
    table = make_table("", *(f"@{mark}" for mark in marks), caption="loss in nats")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, curve in reading.losses.items():
        table.add_row(name, *(f"{curve[max(0, mark - 256) : mark].mean():.3f}" for mark in marks))
    console.print(table)


def _heading(step: str, text: str) -> None:
    console.rule(f"[bold]{step}[/]  {text}", align="left", style="dim")
