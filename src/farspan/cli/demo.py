"""`farspan demo`"""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape

from farspan.cli.console import console, print_line
from farspan.cli.diagnose import show_diagnoses
from farspan.cli.extend import show_extension


def demo_command() -> None:
    """Extend a small bundled model from 512 to 1,024 tokens, in minutes on a CPU."""
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
    figure = demo.draw_figure(folder, {"uniform": uniform, "headscale, reduced": headscale})
    before, after = uniform.before, headscale.after
    console.rule(style="dim")
    print_line(
        f"At 1,024 tokens the loss fell by {before['loss@1024'] - after['loss@1024']:.2f} nats. "
        f"Passkey retrieval there, which sharper attention can harm, changed from "
        f"{before['passkey@1024']:.2f} to {after['passkey@1024']:.2f}. "
        f"The figure is [bold]{escape(str(figure))}[/]."
    )


def _heading(step: str, text: str) -> None:
    console.rule(f"[bold]{step}[/]  {text}", align="left", style="dim")
