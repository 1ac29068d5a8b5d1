"""What is tortured: tiny models, texts, recipes and runs, and the long commands on them.

Every case runs in a folder of its own in which `in` is a link to these inputs, so that all paths of
a command are relative, and the files that it writes are equal in every case.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

LENGTH = 16  # the train length of the models
STUDY_LENGTH = 192  # the same of the model of the study: passkeys need room
TEXT = ["--data", "in/text.txt"]
SMALL = ["search_windows=2", "choose_windows=1", "report_windows=1", "passkeys=0"]
TRAINED = ["tuning.steps=3", "tuning.batch=2", "tuning.micro_batch=1", "tuning.save_every=1"]


def _extend(model: str, method: str, *settings: str) -> list[str]:
    target = ["--to", str(2 * LENGTH), "--method", method, "-o", "out"]
    return ["extend", f"in/{model}", *target, *TEXT, *SMALL, *settings]


def _export(name: str, model: str = "in/patch") -> list[str]:
    return ["export", model, "--format", name, "-o", "out"]


# The long commands, by name. All of them write to `out`.
COMMANDS: dict[str, list[str]] = {
    "pretrain": ["pretrain", "in/pretrain.toml", "-o", "out"],
    "extend-uniform": _extend("nope", "uniform"),
    "extend-headscale": _extend("nope", "headscale", "search.steps=4", "search.save_every=1"),
    "extend-yarn": _extend("rope", "yarn"),
    "extend-tuned": _extend("rope", "yarn", "tune=fair", *TRAINED),
    "extend-swan": _extend("rope", "swan", "swan.tokens=128", *TRAINED[1:]),
    "eval": [
        *("eval", "in/nope", "-o", "out", "--suite", "perplexity", *TEXT),
        *("--lengths", f"{LENGTH},{2 * LENGTH}", "--windows", "2"),
    ],
    "lab": ["lab", "run", "in/lab.toml", "-o", "out"],
    "reproduce": ["reproduce", "in/study.toml", "-o", "out"],
    "export-folded": _export("folded"),
    "export-live": _export("live"),
    "export-stock": _export("stock", "in/llama"),
    "export-gguf": _export("gguf", "in/llama"),
    "diagnose": ["diagnose", "in/nope", "-o", "out", *TEXT, "--windows", "2"],
    "report": ["report", "in/evaluated", "-o", "out.html"],
}

# Results of commands that are inputs of others: where they are, and their name there.
KEPT = {
    "eval": ("out", "evaluated"),
    "pretrain": ("out", "trained"),
    "export-gguf": ("out/model.gguf", "llama.gguf"),
}
PRETRAIN = f"""
[data]
folder = "in"
cache = "cache"
vocabulary = 300
passkey = 0.0
processes = 1
[data.sources.docs]
files = "text.txt"
weight = 1.0
[model]
position = "none"
layers = 1
width = 32
heads = 2
ff = 48
[train]
steps = 6
length = {LENGTH}
batch = 2
micro_batch = 2
save_every = 2
keep_at = []
log_every = 2
[optimization]
warmup = 2
"""
LAB = """
tasks = ["copy"]
encodings = ["none", "learned"]
seeds = [0, 1]
lrs = [1e-2]
train_examples = 32
test_examples = 10
processes = 1
save = true
[train_lengths]
copy = "2:4"
[test_lengths]
copy = "5:6"
[sizes.mini]
layers = 1
width = 16
heads = 2
ff = 32
[train]
steps = 3
batch = 8
buckets = 2
"""
STUDY = """
folder = "in/data"
runs = "in/runs"
search = "a.jsonl"
choose = "b.jsonl"
report = ["c.jsonl"]
factors = [2]
seeds = [0]
report_windows = 1
report_factor = 2
passkeys = 1
grids = []
[methods]
tiny = ["none", "uniform", "headscale"]
[extension]
search_windows = 4
choose_windows = 1
[extension.search]
steps = 2
batch = 2
lr = [0.1]
warmup = 1
"""
# Keys of JSON files that say when something happened or how long it took; the checksum of a cell
# covers them.
TIMES = {"when", "seconds", "tokens_per_second", "mfu", "time", "sha256"}


def build(folder: Path) -> None:
    """Write the inputs of all cases; call it with the folder's parent as a scratch folder."""
    from farspan.data.documents import read_documents
    from farspan.data.tokens import train_tokenizer

    folder.mkdir(parents=True)
    text = next(iter(read_documents("python-docs"))).text
    (folder / "text.txt").write_text(text[:30_000])
    (folder / "data").mkdir()
    for number, name in enumerate("abc"):
        part = text[number * 10_000 : (number + 1) * 10_000]
        (folder / "data" / f"{name}.jsonl").write_text(json.dumps({"text": part}) + "\n")
    for name, content in (("pretrain", PRETRAIN), ("lab", LAB), ("study", STUDY)):
        (folder / f"{name}.toml").write_text(content)
    tokenizer = train_tokenizer([text[:20_000]], 300)
    for name in ("nope", "rope", "llama"):
        _save_model(name, tokenizer, folder / name)
    _save_model("llama", tokenizer, folder / "shards", max_shard_size="20KB")
    _save_model("study", tokenizer, folder / "runs" / "tiny" / "model")
    _save_patch(folder)


def preload() -> None:
    """Import what commands import, so that a fork starts with all of it."""
    import importlib
    import pkgutil

    import farspan

    for module in pkgutil.walk_packages(farspan.__path__, "farspan."):
        if module.name not in ("farspan.__main__", "farspan.attention.kernels"):
            importlib.import_module(module.name)
    for name in ("gguf", "plotly.offline", "peft", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _save_model(name: str, tokenizer: Any, folder: Path, **options: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from farspan.model import FarspanConfig, FarspanForCausalLM

    shape: dict[str, Any] = dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=len(tokenizer),
        max_position_embeddings=STUDY_LENGTH if name == "study" else LENGTH,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    if name == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**shape))
    else:
        position = "rope" if name == "rope" else "none"
        model = FarspanForCausalLM(FarspanConfig(**shape, position=position))
    model.save_pretrained(folder, **options)
    tokenizer.save_pretrained(folder)


def _save_patch(folder: Path) -> None:
    import farspan
    from farspan.attention.patch import Patch, fingerprint
    from farspan.attention.scales import Scales

    model = farspan.load(folder / "nope").model
    scales = Scales.uniform(1.2, range(2), 2)
    Patch("test", fingerprint(model), 2 * LENGTH, LENGTH, scales, name="in/nope").save(
        folder / "patch"
    )


@contextmanager
def plain_figures() -> Iterator[None]:
    """Drawing takes longer than all the rest: in the block, a figure is a few bytes."""
    from matplotlib.figure import Figure

    def savefig(self: Any, file: Any, **_options: Any) -> None:
        Path(file).write_bytes(b"figure") if isinstance(file, str | Path) else file.write(b"figure")

    original, Figure.savefig = Figure.savefig, savefig
    try:
        yield
    finally:
        Figure.savefig = original


def snapshot(folder: Path) -> dict[str, str]:
    """The files under a folder with hashes of what is in them, times and inputs apart.

    Of checkpoints only the last counts: a run that is stopped writes one more.
    """
    checkpoints = sorted(folder.glob("out/checkpoints/step-*"))[:-1]
    return {
        str(path.relative_to(folder)): _content_hash(path, folder)
        for path in sorted(folder.rglob("*"))
        if path.relative_to(folder).parts[0] != "in"
        and not path.is_symlink()
        and not {path, *path.parents} & {*checkpoints}
    }


def _content_hash(path: Path, folder: Path) -> str:
    if path.is_dir():
        return "folder"
    content = path.read_bytes().replace(str(folder).encode(), b"FOLDER")
    if path.suffix in (".json", ".jsonl"):
        lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
        content = json.dumps([_without_times(json.loads(line)) for line in lines]).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if key not in TIMES}
    return [_without_times(item) for item in value] if isinstance(value, list) else value


def differences(expected: dict[str, str], actual: dict[str, str]) -> list[str]:
    """What is missing, left over or changed in a snapshot."""
    return (
        [f"{name} is missing" for name in expected if name not in actual]
        + [f"{name} is left over" for name in actual if name not in expected]
        + [
            f"{name} differs"
            for name in expected
            if actual.get(name, expected[name]) != expected[name]
        ]
    )
