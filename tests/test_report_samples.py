"""The samples of a report: every answer is in the page, packed, with its question."""

from __future__ import annotations

import base64
import gzip
import json
import re
import uuid
from collections import Counter

import numpy as np
import pytest

from farspan.evals.answers import text_around
from farspan.evals.needle import haystack_sentences
from farspan.evals.ruler_tasks import TASKS
from farspan.evals.ruler_words import ADJECTIVES, NOUNS
from farspan.report import samples
from farspan.report.page import Run, page
from farspan.report.samples import COLUMNS, LONGEST_TEXT
from farspan.workflows.report import _plotly

WORDS = [*ADJECTIVES.split(), *NOUNS.split()]


def needle(number: int, **changes) -> dict:
    return {
        "model": "m",
        "eval": "ruler",
        "task": "niah_single_1",
        "length": 4096,
        "depths": [0.25],
        "question": "What is the number?",
        "around": f"… the number is: {number}. …",
        "prediction": f" {number}",
        "answers": [str(number)],
        "score": 1.0,
        **changes,
    }


def written(*of_runs: list[dict]) -> str:
    record = {"command": "eval", "scores": []}
    return page([Run(f"run {n}", record, samples=rows) for n, rows in enumerate(of_runs)], "")


def unpacked(text: str) -> list[dict]:
    packs = re.findall('<script type="application/gzip">(.*?)</script>', text)
    return [json.loads(gzip.decompress(base64.b64decode(pack))) for pack in packs]


def test_a_table_has_what_is_asked_and_answered():
    passkey = {"model": "m", "eval": "passkey", "task": "passkey", "length": 256, "depth": 0.5}
    window = {"model": "m", "eval": "perplexity", "task": "t", "length": 256, "nll": 3.0}
    rows = [
        needle(7),
        needle(8, prediction="x" * 900, score=0.5),
        {**passkey, "key": 22, "said": " 23", "hit": False},
        needle(9, eval="longbench", task="trec", score=100.0, depths=[]),
        window,
    ]
    (columns,) = unpacked(written(rows))
    assert tuple(columns) == COLUMNS
    assert columns["task"] == ["niah_single_1", "niah_single_1", "passkey", "trec"]
    assert columns["score"] == [1.0, 0.5, 0.0, 1.0]
    assert columns["depth"] == [0.25, 0.25, 0.5, None]
    assert columns["expected"] == ["7", "8", "22", "9"]
    assert columns["answer"][0] == " 7"
    assert columns["answer"][1] == "x" * LONGEST_TEXT + "…"
    assert columns["around"][2] == "… The pass key is 22. Remember it. …"


def test_each_run_has_a_table_and_old_samples_are_shown():
    old = {key: value for key, value in needle(7).items() if key not in ("around", "depths")}
    text = written([needle(7, prediction="</script><b>")], [old], [])
    first, second = unpacked(text)
    assert first["answer"] == ["</script><b>"]
    assert "</script><b>" not in text
    assert (second["around"], second["depth"]) == ([""], [None])
    assert re.findall("<summary>(.*?)</summary>", text) == ["run 0: 1 sample", "run 1: 1 sample"]


def random_text(rng: np.random.Generator, words: int) -> str:
    return " ".join(WORDS[place] for place in rng.integers(len(WORDS), size=words))


def random_needles(count: int) -> list[dict]:
    rng = np.random.default_rng(0)
    return [
        needle(
            int(rng.integers(10**6, 10**7)),
            around=random_text(rng, 25),
            prediction=random_text(rng, 80),
            question=f"What is the special magic number for {random_text(rng, 2)}?",
        )
        for _ in range(count)
    ]


def realistic_samples(count: int) -> list[dict]:
    """Of 13 tasks at six lengths: English around a UUID, which is the answer, and behind it."""
    essay, rng = " ".join(haystack_sentences("python-docs", 8192)), np.random.default_rng(0)

    def text(characters: int) -> str:
        start = int(rng.integers(len(essay) - characters))
        return essay[start : start + characters]

    rows = []
    for number in range(count):
        answer = str(uuid.UUID(bytes=rng.bytes(16)))
        rows.append(
            needle(
                number,
                task=TASKS[number * len(TASKS) // count],  # one after the other, as in a file
                length=4096 * 2 ** (number % 6),
                depths=[round(rng.random(), 4)],
                question=f"What is the special magic uuid for {text(12)}?",
                around=f"…{text(60)} {answer} {text(110)}…",
                prediction=f" {answer}. {text(300)}",
                answers=[answer],
                score=float(rng.integers(2)),
            )
        )
    return rows


@pytest.mark.long
def test_a_page_of_8_mb_holds_10_000_realistic_samples():
    pytest.importorskip("plotly")
    run = Run("run", {"command": "eval", "scores": []}, samples=realistic_samples(10_000))
    text = page([run], _plotly())
    assert "<summary>run: 10,000 samples</summary>" in text
    assert 4_500_000 < len(text.encode()) < 5_000_000, "as docs/eval.md says"
    assert len(_plotly()) + samples.PACKED < 7_500_000, "and half a MB for charts"


def test_runs_and_tasks_share_the_room_of_a_page(monkeypatch):
    """With too many samples, each of two runs shows as many of every task at every length."""
    monkeypatch.setattr(samples, "MOST", 2 * 2 * 78)
    rows = realistic_samples(1100)
    first, second, third = unpacked(written(rows, rows[:30], rows))
    assert [len(each["task"]) for each in (first, second, third)] == [141, 30, 141]
    for columns in (first, third):
        counts = Counter(zip(columns["task"], columns["length"], strict=True))
        assert len(counts) == 13 * 6
        assert {*counts.values()} <= {1, 2}
    order = [*dict.fromkeys(first["task"])]
    assert order == [*TASKS], "in the order of the file"


def test_a_few_of_many_samples_are_from_the_whole_file():
    rows = [["m", "t", 256, depth] for depth in range(100)]
    assert [row[3] for row in samples.spread(rows, 4)] == [12, 37, 62, 87]
    assert samples.spread(rows, 100) == rows
    assert samples.spread(rows, 0) == []


def test_samples_stay_within_their_share_of_the_page(monkeypatch):
    monkeypatch.setattr(samples, "MOST", 300)
    text = written(random_needles(305))
    assert "run 0: 300 samples; 5 more are in its folder" in text
    assert "300 samples; 1 more is in its folder" in written(random_needles(301))
    room = len(text) // 2
    monkeypatch.setattr(samples, "PACKED", room)
    first, second = random_needles(200), random_needles(100)
    text = written(first, second)
    shown = [len(columns["task"]) for columns in unpacked(text)]
    assert shown[0] + shown[1] < 300
    assert 0.7 < shown[0] / shown[1] < 1.4, "in equal parts"
    packs = re.findall('<script type="application/gzip">(.*?)</script>', text)
    assert 0.9 * room < sum(map(len, packs)) < room + 200, "an empty table takes 200"
    assert f"{200 - shown[0]} more are in its folder" in text


def test_runs_for_which_no_room_is_left_are_packed_twice(monkeypatch):
    """Once whole, and once empty: a large run takes a second each time."""
    packed_rows = []

    def counting_pack(rows):
        packed_rows.append(len(rows))
        return pack(rows)

    pack = samples.pack
    monkeypatch.setattr(samples, "pack", counting_pack)
    monkeypatch.setattr(samples, "PACKED", 1)
    list(samples.samples_table({str(number): [needle(7)] * 100 for number in range(6)}))
    assert packed_rows == [100] * 6 + [0] * 6


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        ("nothing", ["42"], ""),
        (f"{'a ' * 80}42{' b' * 80}", ["42"], f"…{'a ' * 30}42{' b' * 59}…"),
        (f"1 {'x ' * 200}2", ["2", "1"], f"1{' x' * 59} … …{'x ' * 30}2"),
        ("1 2 3", ["3", "1"], "1 2 3"),
        (f"1{'x' * 179}2", ["1", "2"], f"1{'x' * 179}2"),  # the two pieces touch
        (f"1{'x' * 180}2", ["1", "2"], f"1{'x' * 119}… …{'x' * 60}2"),
    ],
)
def test_the_text_around_answers_is_kept(text, answers, expected):
    assert text_around(text, answers) == expected
