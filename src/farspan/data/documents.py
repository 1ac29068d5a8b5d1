"""Read documents from files, folders, hub data sets, or Python's own documentation.

`python-docs` is CPython's language reference, which ships with every Python. Its topics, sorted and
joined, form one document: the first 80% is for searching and the last 20% for scoring.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from farspan.errors import CorruptError, FarspanError, install_hint
from farspan.files import check_unpacked
from farspan.hub import is_hub_id, unavailable_reason

PYTHON_DOCS = "python-docs"
PARTS = {"": (0.0, 1.0), "search": (0.0, 0.8), "score": (0.8, 1.0)}
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
MAX_LINE = 1 << 28  # bytes; a small compressed file can hold a line that no memory holds
SUFFIXES = TEXT_SUFFIXES + JSONL_SUFFIXES + PARQUET_SUFFIXES


@dataclass(frozen=True)
class Document:
    name: str
    text: str


def read_documents(source: str | Path) -> Iterator[Document]:
    """Yield the documents of a source in a fixed order.

    source: a text file, JSON Lines (plain, .gz, .xz, .zst), Parquet, a folder of these, a hub data
        set, or `python-docs` (also `python-docs/search` and `python-docs/score`).

    >>> next(read_documents("python-docs")).name
    'python-docs'
    """
    path = Path(source)
    check_text(source)
    if _is_python_docs(source):
        return iter([_read_python_docs(str(source).partition("/")[2])])
    if path.is_dir():
        return _read_folder(path)
    if path.is_file():
        return _read_file(path)
    return _read_hub(str(source))


def check_text(source: str | Path) -> None:
    """Refuse a source that is neither here nor on the hub by its name, before a model is loaded."""
    if not str(source):
        raise FarspanError(f"no text was given; pass a file, a folder, or {PYTHON_DOCS}")
    is_local = _is_python_docs(source) or Path(source).is_dir() or Path(source).is_file()
    if not is_local and not is_hub_id(str(source)):
        raise FarspanError(
            f"{str(source)!r} is not a file, folder or data set; check the path, or use "
            f"{PYTHON_DOCS}"
        )


def _is_python_docs(source: str | Path) -> bool:
    return str(source).partition("/")[0] == PYTHON_DOCS and not Path(source).exists()


def share_text(first: str | Path, second: str | Path) -> bool:
    """Whether two sources are the same, or one contains the other, judged by their paths.

    >>> share_text("python-docs", "python-docs/search")
    True
    >>> share_text("python-docs/search", "python-docs/score")
    False
    """
    first, second = _resolve(first), _resolve(second)
    return first == second or first in second.parents or second in first.parents


def _resolve(source: str | Path) -> Path:
    return Path(source) if _is_python_docs(source) else Path(source).resolve()


def _read_python_docs(part: str) -> Document:
    from pydoc_data.topics import topics

    if part not in PARTS:
        raise FarspanError(
            f"{PYTHON_DOCS} has no part {part!r}; choose {PYTHON_DOCS}, {PYTHON_DOCS}/search or "
            f"{PYTHON_DOCS}/score"
        )
    text = "\n\n".join(topics[name] for name in sorted(topics))
    start, stop = (int(share * len(text)) for share in PARTS[part])
    return Document(f"{PYTHON_DOCS}/{part}".rstrip("/"), text[start:stop])


def _read_folder(folder: Path) -> Iterator[Document]:
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name.endswith(SUFFIXES)
    )
    if not files:
        raise FarspanError(
            f"{folder} contains no text files; supported types are {', '.join(SUFFIXES)}"
        )
    for file in files:
        yield from _read_file(file)


def _read_file(path: Path) -> Iterator[Document]:
    if path.name.endswith(JSONL_SUFFIXES):
        return _read_jsonl(path)
    if path.name.endswith(PARQUET_SUFFIXES):
        return _read_parquet(path)
    if path.suffix == ".json":
        raise FarspanError(
            f"{path} would be read as one text, JSON syntax included; write JSON Lines, a document "
            'such as {"text": "…"} on each line, to a .jsonl file'
        )
    check_unpacked(path)
    return iter([Document(path.name, _decode(path, path.read_bytes()))])


def _decode(path: Path, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")  # some editors put a byte order mark first
    except UnicodeDecodeError as error:
        raise CorruptError(
            f"{path} is not UTF-8 text (byte {error.start} is {raw[error.start]:#04x}); "
            "convert it to UTF-8"
        ) from None


def _read_jsonl(path: Path) -> Iterator[Document]:
    try:
        with _open(path) as file:
            lines = iter(lambda: file.readline(MAX_LINE + 1), b"")
            for number, line in enumerate(lines, 1):
                if len(line) > MAX_LINE:
                    raise CorruptError(
                        f"{path}, line {number} has more than {MAX_LINE} bytes; write one document "
                        "on each line"
                    )
                if line.strip():
                    yield _parse_line(path, number, line)
    except FarspanError:
        raise
    except Exception as error:  # every compression format has its own error classes
        raise CorruptError(f"{path} is damaged ({error}); download it again") from None


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    if path.suffix == ".zst":
        reader = (
            _import_extra("zstandard", path)
            .ZstdDecompressor()
            .stream_reader(path.open("rb"), read_across_frames=True)
        )
        return io.BufferedReader(reader)  # the zstd reader has no line iteration
    return path.open("rb")


def _parse_line(path: Path, number: int, line: bytes) -> Document:
    try:
        record = json.loads(line)
        text, name = record["text"], record.get("id", f"line {number}")
        text.encode()  # raises for half of a surrogate pair
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(
            f'{path}, line {number} is not a JSON object with a "text" string '
            f"({type(error).__name__}); fix or remove that line"
        ) from None
    return Document(f"{path.name}:{name}", text)


def _read_parquet(path: Path) -> Iterator[Document]:
    parquet = _import_extra("pyarrow.parquet", path)
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:
        raise CorruptError(f"{path} is damaged ({error}); download it again") from None
    if "text" not in file.schema_arrow.names:
        raise FarspanError(
            f'{path} has no column "text" (it has {file.schema_arrow.names}); '
            "rename the text column"
        )
    number = 0
    for batch in file.iter_batches(columns=["text"]):
        for text in batch.column(0).to_pylist():
            number += 1
            if not isinstance(text, str):
                raise CorruptError(f"{path}, row {number} has no text; remove that row")
            yield Document(f"{path.name}:row {number}", text)


def _read_hub(name: str) -> Iterator[Document]:
    datasets = _import_extra("datasets", name)
    reason = unavailable_reason(name, "dataset")
    try:
        rows = () if reason else datasets.load_dataset(name, split="test", streaming=True)
    except Exception as error:  # a data set's own code can raise anything
        reason = type(error).__name__
    if reason:
        raise FarspanError(
            f"{name} is not a local file, and no data set could be loaded from the hub ({reason}); "
            "check the path, the name, or the network"
        )
    return (Document(f"{name}:{number}", _row_text(name, row)) for number, row in enumerate(rows))


def _row_text(name: str, row: dict[str, Any]) -> str:
    if not isinstance(row.get("text"), str):
        raise FarspanError(
            f'{name} has no column "text" (it has {list(row)}); use a data set that has one'
        )
    return row["text"]


def _import_extra(module: str, source: str | Path) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise FarspanError(
            f"reading {source} needs {module.partition('.')[0]}, which is not installed; "
            + install_hint("data")
        ) from None
