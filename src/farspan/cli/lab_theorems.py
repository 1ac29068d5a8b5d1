"""`farspan lab theorems`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from farspan.cli.console import note, print_json, print_line, print_saved, print_text
from farspan.cli.lab_options import TrustLabCode
from farspan.cli.options import MODEL_KINDS, AsJson, Bos, Device, OutFolder, Text

if TYPE_CHECKING:
    from farspan.lab.theorems import PositionAnalysis


def theorems_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL", help=f"Models: {MODEL_KINDS}.", show_default="theorems only"
        ),
    ] = None,
    data: Text = "python-docs",
    length: Annotated[
        int, typer.Option(min=4, max=16_384, metavar="N", help="Tokens per window of text.")
    ] = 512,
    windows: Annotated[
        int,
        typer.Option(
            min=2, metavar="N", help="Number of windows; half are fitted on, half are tested on."
        ),
    ] = 8,
    out: OutFolder = None,
    device: Device = None,
    trust_remote_code: TrustLabCode = False,
    bos: Bos = "auto",
    as_json: AsJson = False,
) -> None:
    """Check how a model without position encoding can know positions (theorems of Kazemnejad 2023).

    Verifies weights built by the theorems, and predicts positions from each model's hidden states.
    """
    from farspan.workflows.attention_analysis import theorems

    analysis = theorems(
        models or [],
        data,
        out,
        length=length,
        windows=windows,
        bos=bos,
        device=device,
        trust_remote_code=trust_remote_code,
        say=note,
    )
    show_theorems(analysis, length, as_json)
    if out is not None and not as_json:
        print_saved("record and figure", out)


def show_theorems(analysis: PositionAnalysis, length: int, as_json: bool = False) -> None:
    if as_json:
        print_json(analysis.to_dict())
        return
    for proof in analysis.proofs:
        print_line(
            f"{proof.rule:>10}: up to {length:,} tokens, the first layer computes positions within "
            f"{proof.position_error:.0e}, and the second scores by distance within "
            f"{proof.score_error:.0e}"
        )
    for name, readouts in analysis.readings.items():
        values = "  ".join(f"{readout.r2:.3f}" for readout in readouts)
        print_text(f"{name}: R² of the position in the embeddings and after each layer  {values}")
        print_text(f"{'':{len(name)}}  mean error after the last: {readouts[-1].error:.0f} tokens")
