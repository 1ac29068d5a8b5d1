"""Documents from files, folders, data sets, or from Python itself. None is ever cut or joined without saying so.

`python-docs` is CPython's own language reference, which every Python carries: its topics, sorted and joined, are one
declared document, of which the first 80% are for searching and the last 20% for scoring.
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

from farspan.errors import CorruptError, FarspanError
from farspan.files import check_unpacked
from farspan.hub import is_hub_id, refusal

PYTHON_DOCS = "python-docs"
PARTS = {"": (0.0, 1.0), "search": (0.0, 0.8), "score": (0.8, 1.0)}
TEXT = (".txt", ".md", ".rst", ".py")
LINES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst")
TABLES = (".parquet",)


@dataclass(frozen=True)
class Document:
    name: str
    text: str


def read_documents(source: str | Path) -> Iterator[Document]:
    """The documents of a text file, JSON Lines (plain, .gz, .xz, .zst), Parquet, a folder of these, a hub data set, or
    `python-docs` (also `python-docs/search` and `python-docs/score`), in a fixed order.

    >>> next(read_documents("python-docs")).name
    'python-docs'
    """
    path = Path(source)
    if not str(source):
        raise FarspanError(f"no text was named; give a file, a folder, or {PYTHON_DOCS}")
    if str(source).partition("/")[0] == PYTHON_DOCS and not path.exists():
        return iter([_python_docs(str(source).partition("/")[2])])
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        return _file(path)
    return _hub(str(source))


def share_text(one: str | Path, other: str | Path) -> bool:
    """Are two sources one, or is one inside the other? By their places alone.

    >>> share_text("python-docs", "python-docs/search"), share_text("python-docs/search", "python-docs/score")
    (True, False)
    """
    here, there = _place(one), _place(other)
    return here == there or here in there.parents or there in here.parents


def _place(source: str | Path) -> Path:
    path = Path(source)
    return path if path.parts[:1] == (PYTHON_DOCS,) and not path.exists() else path.resolve()


def _python_docs(part: str) -> Document:
    from pydoc_data.topics import topics

    if part not in PARTS:
        raise FarspanError(f"{PYTHON_DOCS} has no part {part!r}; choose {PYTHON_DOCS}, /search or /score")
    text = "\n\n".join(topics[name] for name in sorted(topics))
    start, stop = (int(share * len(text)) for share in PARTS[part])
    return Document(f"{PYTHON_DOCS}/{part}".rstrip("/"), text[start:stop])


def _folder(folder: Path) -> Iterator[Document]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name.endswith(TEXT + LINES + TABLES))
    if not files:
        raise FarspanError(f"{folder} holds no text; farspan reads {', '.join(TEXT + LINES + TABLES)}")
    for file in files:
        yield from _file(file)


def _file(path: Path) -> Iterator[Document]:
    if path.name.endswith(LINES):
        return _lines(path)
    if path.name.endswith(TABLES):
        return _table(path)
    check_unpacked(path)
    return iter([Document(path.name, _decoded(path, path.read_bytes()))])


def _decoded(path: Path, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptError(
            f"{path} is not UTF-8 text (byte {error.start} is {raw[error.start]:#04x}); convert it to UTF-8"
        ) from None


def _lines(path: Path) -> Iterator[Document]:
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _record(path, number, line)
    except FarspanError:
        raise
    except Exception as error:  # each compression has errors of its own
        raise CorruptError(f"{path} is damaged ({error}); fetch it again") from None


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    if path.suffix == ".zst":
        reader = _extra("zstandard", path).ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True)
        return io.BufferedReader(reader)  # for it does not read by lines itself
    return path.open("rb")


def _record(path: Path, number: int, line: bytes) -> Document:
    try:
        record = json.loads(line)
        text, name = record["text"], record.get("id", f"line {number}")
        text.encode()  # half of a surrogate pair is no text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(
            f'{path}, line {number} is no JSON object with a "text" ({type(error).__name__}); mend or remove that line'
        ) from None
    return Document(f"{path.name}:{name}", text)


def _table(path: Path) -> Iterator[Document]:
    parquet = _extra("pyarrow.parquet", path)
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:
        raise CorruptError(f"{path} is damaged ({error}); fetch it again") from None
    if "text" not in file.schema_arrow.names:
        raise FarspanError(f'{path} has no column "text" (it has {file.schema_arrow.names}); rename the right one')
    number = 0
    for batch in file.iter_batches(columns=["text"]):
        for text in batch.column(0).to_pylist():
            number += 1
            if not isinstance(text, str):
                raise CorruptError(f"{path}, row {number} has no text; remove that row")
            yield Document(f"{path.name}:row {number}", text)


def _hub(name: str) -> Iterator[Document]:
    if not is_hub_id(name):
        raise FarspanError(f"{name!r} is no file, folder or data set; check the path, or use {PYTHON_DOCS}")
    datasets, why = _extra("datasets", name), refusal(name, "dataset")
    try:
        rows = () if why else datasets.load_dataset(name, split="test", streaming=True)
    except Exception as error:  # whatever the data set has to say
        why = type(error).__name__
    if why:
        raise FarspanError(
            f"{name} is no file here, and no data set could be loaded from the hub ({why}); check the path, the name, "
            "or the network"
        )
    return (Document(f"{name}:{number}", _text_of(name, row)) for number, row in enumerate(rows))


def _text_of(name: str, row: dict[str, Any]) -> str:
    if not isinstance(row.get("text"), str):
        raise FarspanError(f'{name} has no column "text" (it has {list(row)}); give files that have')
    return row["text"]


def _extra(module: str, source: str | Path) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise FarspanError(
            f"reading {source} needs {module.partition('.')[0]}; install it with pip install 'farspan[data]'"
        ) from None
