"""Read .gguf files fast.

transformers reads them through the gguf package, which makes an array of every word of the
vocabulary, anew in each of several passes, and unpacks the weights in one thread. Inside
`fast_gguf` it gets one header for all passes, and weights that all cores unpack in blocks. What is
read is the same, bit by bit: the arithmetic is that of gguf.quants.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from farspan.errors import CorruptError, FarspanError, first_line, install_hint
from farspan.progress import Progress, silent

BLOCK = 1 << 20  # weights that a thread unpacks at once; more do not fit into its cache
LONG_ARRAY = 1000  # longer ones belong to the vocabulary
WORDS, BOS = "tokenizer.ggml.tokens", "tokenizer.ggml.add_bos_token"
_replacing = threading.Lock()  # the functions of gguf are replaced for one file at a time


def read_header(file: Path) -> Any:
    """The fields and the tensors of a file, as gguf.GGUFReader has them; no weight is read."""
    if importlib.util.find_spec("gguf") is None:
        raise FarspanError(
            f"reading {file.name} needs gguf, which is not installed; {install_hint('gguf')}"
        )
    try:
        return _reader_class()(file)
    except Exception as error:  # a damaged file fails anywhere in the reader
        raise CorruptError(
            f"{file} is damaged or no GGUF file ({first_line(error)}); download or export it again"
        ) from None


def without_vocabulary(header: Any) -> Any:
    """A header in which only the number of words is left, which is all that a config needs."""
    short = copy.copy(header)
    short.fields = {
        key: field for key, field in header.fields.items() if len(field.data) < LONG_ARRAY
    }
    if WORDS in header.fields and WORDS not in short.fields:
        from gguf import GGUFValueType, ReaderField

        count, types = len(header.fields[WORDS].data), [GGUFValueType.ARRAY, GGUFValueType.UINT8]
        short.fields[WORDS] = ReaderField(
            0, WORDS, [np.zeros(1, dtype=np.uint8)], [0] * count, types
        )
    return short


@contextmanager
def fast_gguf(file: Path, header: Any, progress: Progress = silent) -> Iterator[None]:
    """In the block, the gguf package reads this file by its header, and unpacks in parallel."""
    import gguf

    names: Any = gguf
    reader, unpack_all, name_map = gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map
    advance: Any = None  # a bar appears with the first weights

    def open_file(path: Any, mode: Any = "r") -> Any:
        return header if Path(path).resolve() == file.resolve() else reader(path, mode)

    with _replacing, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:

        def unpack(data: np.ndarray, kind: Any) -> np.ndarray:
            nonlocal advance
            advance = advance or progress(f"unpack {file.name}", len(header.tensors))
            advance()
            return _unpack(data, kind, pool, unpack_all)

        names.GGUFReader, names.dequantize = open_file, unpack
        names.get_tensor_name_map = cache(name_map)  # transformers makes one for every module
        try:
            yield
        finally:
            names.GGUFReader, names.dequantize = reader, unpack_all
            names.get_tensor_name_map = name_map


def _unpack(data: np.ndarray, kind: Any, pool: ThreadPoolExecutor, dequantize: Any) -> np.ndarray:
    """The weights of one tensor in float32: blocks of rows, each unpacked by one thread."""
    from gguf.quants import quant_shape_from_byte_shape

    if data.dtype != np.uint8:  # float32 or float16: nothing is packed
        return dequantize(data, kind)
    weights = np.empty(quant_shape_from_byte_shape(data.shape, kind), dtype=np.float32)
    packed, rows = data.reshape(-1, data.shape[-1]), weights.reshape(-1, weights.shape[-1])
    step = max(1, BLOCK // rows.shape[1])

    def unpack_rows(start: int) -> None:
        rows[start : start + step] = dequantize(packed[start : start + step], kind)

    for _ in pool.map(unpack_rows, range(0, len(rows), step)):
        pass
    return weights


@cache
def _reader_class() -> Any:
    from gguf import GGUFReader, GGUFValueType

    class HeaderReader(GGUFReader):
        """gguf's reader, with arrays that are read in one go."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            is_array = raw_type == GGUFValueType.ARRAY and self.byte_order == "I"
            kind, count = struct.unpack_from("<IQ", self._memory, orig_offs) if is_array else (0, 0)
            scalar = self.gguf_scalar_to_np.get(GGUFValueType(kind))
            if not count or (scalar is None and kind != GGUFValueType.STRING):
                return super()._get_field_parts(orig_offs, raw_type)
            start = orig_offs + 12
            parts: list[Any]
            if scalar is not None:
                values = np.frombuffer(self.data, scalar, count, start)
                parts, end = list(values.reshape(-1, 1)), start + values.nbytes
            else:
                parts, end = self._strings(start, count)
            head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
            types = [GGUFValueType.ARRAY, GGUFValueType(kind)]
            return end - orig_offs, head + parts, list(range(2, 2 + count)), types

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            values = super()._get(offset, dtype, count, override_order)
            if len(values) < int(count):  # gguf would read on, one empty value after the other
                raise ValueError("a value ends after the file")
            return values

        @property
        def _memory(self) -> memoryview:
            data: Any = self.data
            return memoryview(data)

        def _strings(self, offset: int, count: int) -> tuple[list[Any], int]:
            memory, parts = self._memory, []
            for _ in range(count):
                (length,) = struct.unpack_from("<Q", memory, offset)
                offset += 8 + length
                if offset > len(memory):
                    raise ValueError("a string ends after the file")
                parts.append(memory[offset - length : offset])
            return parts, offset

    return HeaderReader
