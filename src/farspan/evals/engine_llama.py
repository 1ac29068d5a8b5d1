"""A .gguf file in llama.cpp's own server, in this process (`pip install xllamacpp`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from farspan.errors import FarspanError, first_line


def has_llama() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


@contextmanager
def serve_gguf(file: Path, context: int) -> Iterator[str]:
    """The URL of a server on this machine, with keys and values in float32."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel, settings.warmup, settings.verbosity = context, 1, False, -1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    try:
        server = xllamacpp.Server(settings)
    except (RuntimeError, ValueError, OSError) as error:
        raise FarspanError(
            f"llama.cpp cannot load {file} ({first_line(error)}); check the file"
        ) from None
    try:
        yield f"{server.listening_address}/v1"
    finally:
        del server  # which stops it
