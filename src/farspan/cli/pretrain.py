"""`farspan pretrain`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from farspan.cli.choices import complete_recipe
from farspan.cli.console import (
    console,
    format_memory,
    make_facts,
    note,
    print_json,
    print_line,
)
from farspan.cli.options import AsJson, DryRun, out_option, overrides_argument
from farspan.progress import format_duration
from farspan.signals import stoppable

if TYPE_CHECKING:
    from farspan.workflows.pretrain import PretrainEstimate


def pretrain_command(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="twin-nope, twin-rope, small-nope, small-nope-nopk, small-rope, small-alibi, "
            "small-learned, small-sinusoidal, small-t5, small-swan, small-hybrid, drope-small, "
            "paper-nope, paper-rope, or a .toml file.",
            autocompletion=complete_recipe("pretrain"),
        ),
    ],
    overrides: Annotated[list[str] | None, overrides_argument("train.steps=100")] = None,
    out: Annotated[Path | None, out_option("Run folder.", show_default="runs/RECIPE")] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train a model from a recipe, on one or (with torchrun) several GPUs.

    Rerun the same command to resume.
    """
    from farspan.progress import bars
    from farspan.train.pretrain import check_same_recipe
    from farspan.workflows.pretrain import estimate, pretrain, read_recipe

    if dry_run:
        config = read_recipe(recipe, overrides or [])
        if out is not None:
            check_same_recipe(config, out)
        show_estimate(recipe, estimate(config), as_json)
        return
    with stoppable("the progress of the run is saved"), bars() as progress:
        run = pretrain(recipe, overrides or [], out, progress=progress, say=note)
    if as_json:
        print_json(run.to_dict())
        return
    state = "was already trained" if run.already else "trained"
    print_line(
        f"{state}: {run.steps:,} steps, loss {run.loss:.3f}; "
        f"the model is in {escape(str(run.folder))}"
    )


def show_estimate(recipe: str, estimate: PretrainEstimate, as_json: bool) -> None:
    if as_json:
        print_json(estimate.to_dict())
        return
    size = estimate.files_mb
    text = "text that was not found" if size is None else f"{size:,.0f} MB of files"
    weights, activations = (
        format_memory(gib) for gib in (estimate.weights_gib, estimate.activations_gib)
    )
    facts = make_facts()
    facts.add_row("recipe", escape(recipe))
    facts.add_row("parameters", f"{estimate.parameters:,}")
    facts.add_row("tokens", f"{estimate.tokens:,}, from {text}")
    facts.add_row("memory", f"{weights} per device for weights, gradients and optimizer,")
    facts.add_row("", f"about {activations} for the activations of a micro batch")
    facts.add_row(
        "time", f"at least {format_duration(estimate.seconds)}: {estimate.flops:.2g} FLOP"
    )
    facts.add_row("", f"at {estimate.rate / 1e12:.3g} TFLOP/s, measured now on matrix products")
    console.print(facts)
    if estimate.missing_text:
        note(f"a run would be refused: {estimate.missing_text}")
