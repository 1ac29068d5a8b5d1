"""`farspan generate`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from farspan.cli.console import note
from farspan.cli.options import Bos, Device, Model, Position, TrustRemoteCode
from farspan.errors import FarspanError


def generate_command(
    model: Model,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Prompt: a UTF-8 text file.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Prompt: the text itself.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", help="Maximum number of tokens to generate.")
    ] = 128,
    temperature: Annotated[
        float,
        typer.Option(metavar="T", help="Sampling temperature; 0 decodes greedily."),
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed of the sampling.")] = 0,
    device: Device = None,
    position: Position = None,
    bos: Bos = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Continue a prompt; the text is printed as it is generated."""
    if (prompt is None) == (prompt_file is None):
        raise FarspanError(
            "generate needs one prompt; give either --prompt-file PATH or --prompt TEXT"
        )
    from farspan.workflows.generate import generate, read_prompt

    text = read_prompt(prompt_file) if prompt_file is not None else prompt or ""
    pieces = generate(
        model,
        text,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        position=position,
        bos=bos,
        device=device,
        trust_remote_code=trust_remote_code,
        say=note,
    )
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
