"""`farspan check`"""

from __future__ import annotations

from typing import Annotated

import typer

from farspan.cli.console import print_json, print_text
from farspan.cli.options import AsJson, Bos, Device, Model, Position, Text, TrustRemoteCode


def check_command(
    model: Model,
    engine: Annotated[
        str,
        typer.Option(
            metavar="URL|PATH",
            help="URL of a server (http://localhost:8000/v1), folder that transformers loads, or "
            ".gguf file (run by llama.cpp if xllamacpp is installed).",
        ),
    ],
    length: Annotated[
        int | None,
        typer.Option(
            min=64,
            metavar="N",
            help="Tokens of the text that is compared.",
            show_default="the target of the patch, at most 4,096 or twice the train length",
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="NATS",
            help="Mean difference of 32 positions that is allowed.",
            show_default="a quarter of what the patch changes, at most 0.05",
        ),
    ] = None,
    data: Text = "python-docs",
    served_model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Name of the model on a server.",
            show_default="the only one",
        ),
    ] = "",
    device: Device = None,
    as_json: AsJson = False,
    position: Position = None,
    bos: Bos = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Check that an engine applies a patch: equal to the model here, to its base, or to neither.

    If it is not equal, the exit code is 3.
    """
    from farspan.errors import ProofError
    from farspan.workflows.check import check

    result = check(
        model,
        engine,
        length=length,
        tolerance=tolerance,
        data=data,
        served_model=served_model,
        bos=bos,
        position=position,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        print_json(result.to_json())
    elif result.holds:
        print_text(result.sentence)
    if not result.holds:
        raise ProofError(result.sentence)
