"""`farspan export`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from farspan.cli.choices import DTYPES, FORMATS, complete
from farspan.cli.console import format_file_size, print_json, print_line, print_notes
from farspan.cli.options import AsJson, Device, Model, Position, TrustRemoteCode, out_option

if TYPE_CHECKING:
    from farspan.workflows.export import ExportResult


def export_command(
    model: Model,
    out: Annotated[Path, out_option("New folder for the exported model.")],
    format: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="live (for farspan), folded (scales in the weights), stock (plain transformers), "
            "peft (adapter) or gguf (llama.cpp).",
            autocompletion=complete(FORMATS),
        ),
    ],
    dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Precision of the written weights: float32, bfloat16 or float16.",
            autocompletion=complete(DTYPES),
        ),
    ] = "float32",
    as_json: AsJson = False,
    device: Device = None,
    position: Position = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Export a patched model, or any model, to a format that other tools load.

    The exported model is reloaded and its logits are compared before it is written.
    """
    from farspan.workflows.export import export

    exported = export(
        model,
        out,
        format,
        dtype=dtype,
        device=device,
        position=position,
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        print_json(exported.to_json())
    else:
        show_export(exported)


def show_export(exported: ExportResult) -> None:
    for place, proof in exported.proofs.items():
        print_line(
            f"{place} the train length  max |Δlogit| {proof.max_abs_logit:.2g} "
            f"(tolerance {proof.tolerance:.2g}), KL {proof.kl:.2g} nats, "
            f"same argmax {proof.same_argmax:.1%} of {proof.tokens} tokens"
        )
    print_notes({proof.note: None for proof in exported.proofs.values() if proof.note})
    size, folder = format_file_size(exported.bytes), escape(str(exported.folder))
    print_line(f"verified: {exported.format}, {size} in {folder}")
