"""Lab tasks: correct targets, complete languages, distinct examples and disjoint splits."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from farspan.errors import FarspanError
from farspan.lab import pcfg, scan
from farspan.lab.examples import _balance, draw_examples, length_weights, make_splits
from farspan.lab.tasks import GROUPS, TASKS, Example, LabTask, _number, find_task
from farspan.lab.tokenizer import SPECIAL_TOKENS, WordTokenizer

DATA = Path(os.environ.get("FARSPAN_DATA", Path(__file__).parent.parent.parent / "shared" / "data"))
TOKENIZER = WordTokenizer()


def examples(task: LabTask, n: int = 2_000) -> list[Example]:
    """Examples of all train and test lengths."""
    lengths = [length for length in range(task.train[0], task.test[1] + 1) if task.count(length)]
    rng = np.random.default_rng(7)
    return [task.make(lengths[index], rng) for index in rng.integers(len(lengths), size=n)]


# Checkers independent of the generators: they parse the question and let Python answer it.


def answer_of(target: str) -> str:
    return re.fullmatch(r"The answer is (.*) \.", target)[1]


def python(text: str) -> str:
    """The text as a Python expression: digits joined to numbers, products explicit."""
    joined = re.sub(r"(?<=\d) (?=\d)", "", text)
    return re.sub(r"(\d) x", r"\1 * x", joined)


def body(example: Example) -> list[str]:
    return example.input.split()[1:-1]


def numbers(text: str) -> list[int]:
    return [int(number.replace(" ", "")) for number in text.split(" , ")]


def symbol_index(symbol: str) -> int:
    return int(symbol.removeprefix("w"))


def check_polynomial(example: Example) -> tuple[bool, int]:
    x, expression = re.fullmatch(r"Evaluate x = (.*) in (.*) \?", python(example.input)).groups()
    return eval(expression, {"x": int(x.replace(" ", ""))}) == int(
        answer_of(example.target)
    ), expression.count("**")


def check_summation(example: Example) -> tuple[bool, int]:
    expression = " ".join(body(example))
    return eval(expression) == int(answer_of(example.target)), expression.count("+") + 1


def check_addition(example: Example) -> tuple[bool, int]:
    expression = python(" ".join(body(example)))
    total = int(answer_of(example.target).replace(" ", ""))
    return eval(expression) == total, max(map(len, expression.split(" + ")))


def check_parity(example: Example) -> tuple[bool, int]:
    bits = re.fullmatch(r"Is the number of ones even in ([01 ]*) \?", example.input)[1].split()
    return (bits.count("1") % 2 == 0) == (answer_of(example.target) == "yes"), len(bits)


def check_lego(example: Example) -> tuple[bool, int]:
    """Apply clauses in any order until nothing new follows."""
    clauses, target = re.fullmatch(
        r"If (.*) \. Then , what is the value of (.) \?", example.input
    ).groups()
    parsed = [re.fullmatch(r"(.) = ([+-]) (.)", clause).groups() for clause in clauses.split(" , ")]
    values = {"1": 1}
    for _ in parsed:
        values |= {
            name: values[base] * int(sign + "1") for name, sign, base in parsed if base in values
        }
    assert len(values) == len(parsed) + 1
    return values[target] == int(answer_of(example.target).replace(" ", "")), len(parsed)


def check_scan(example: Example) -> tuple[bool, int]:
    """Phrase by phrase, by the words in it, without recursion."""
    turn = {"left": "I_TURN_LEFT", "right": "I_TURN_RIGHT"}

    parts = re.split(r" (and|after) ", example.input)
    ordered = parts[::-2] if "after" in parts else parts[::2]
    actions: list[str] = []
    for part in ordered:
        words = part.split()
        count = {"twice": 2, "thrice": 3}.get(words[-1], 1)
        words = words[:-1] if count > 1 else words
        verb = [] if words[0] == "turn" else [f"I_{words[0].upper()}"]
        side = [turn[words[-1]]] if words[-1] in turn else []
        if "around" in words:
            once = [*side, *verb] * 4
        elif "opposite" in words:
            once = [*side, *side, *verb]
        else:
            once = [*side, *verb]
        actions += once * count
    return actions == example.target.split(), len(actions)


def check_pcfg(example: Example) -> tuple[bool, int]:
    """From right to left with a stack, without recursion."""
    operations = {
        "copy": lambda x: x,
        "reverse": lambda x: [*reversed(x)],
        "shift": lambda x: [*x[1:], x[0]],
        "swap_first_last": lambda x: [x[-1], *x[1:-1], x[0]],
        "repeat": lambda x: x * 2,
        "echo": lambda x: [*x, x[-1]],
        "append": lambda x, y: [*x, *y],
        "prepend": lambda x, y: [*y, *x],
        "remove_first": lambda x, y: y,
        "remove_second": lambda x, y: x,
    }
    stack: list[list[str]] = []
    functions = 0
    open_string = False
    for word in reversed(example.input.split()):
        operation = operations.get(word)
        if operation:
            functions += 1
            arguments = [stack.pop() for _ in range(operation.__code__.co_argcount)]
            stack.append(operation(*arguments))
        elif word != ",":
            stack.append([word, *stack.pop()] if open_string else [word])
        open_string = operation is None and word != ","
    return stack == [example.target.split()], functions


def check_replace(example: Example) -> tuple[bool, int]:
    pattern = r"Replace (w\d+) with (w\d+) in (.*) \."
    before, after, words = re.fullmatch(pattern, example.input).groups()
    assert before != after
    assert set(words.split()) == {before}
    return example.target == words.replace(before, after), len(words.split())


def check_two_lists(example: Example, first: int, second: int) -> tuple[bool, int]:
    """The target is the list twice, each time forward (1) or backward (-1)."""
    lists = [part.split() for part in example.target.split(" <next> ")]
    return lists == [body(example)[::first], body(example)[::second]], len(body(example))


CHECKS = {
    "copy": lambda e: (e.target.split() == body(e), len(body(e))),
    "copy-repeat": lambda e: (e.target.split() == body(e) and len(set(body(e))) == 1, len(body(e))),
    "copy-repeat-double": lambda e: (
        e.target.split() == body(e) * 2 and len(set(body(e))) == 1,
        len(body(e)),
    ),
    "copy-replace": check_replace,
    "copy-next": lambda e: (
        [symbol_index(w) for w in e.target.split()] == [symbol_index(w) % 100 + 1 for w in body(e)],
        len(body(e)),
    ),
    "copy-double": lambda e: check_two_lists(e, 1, 1),
    "reverse": lambda e: (e.target.split()[::-1] == body(e), len(body(e))),
    "reverse-double": lambda e: check_two_lists(e, -1, -1),
    "reverse-copy": lambda e: check_two_lists(e, -1, 1),
    "reverse-numbers": lambda e: (
        numbers(e.target)[::-1] == numbers(" ".join(body(e))),
        len(numbers(e.target)),
    ),
    "addition": check_addition,
    "polynomial": check_polynomial,
    "sorting": lambda e: (
        answer_of(e.target).split() == sorted(body(e), key=symbol_index),
        len(body(e)),
    ),
    "sorting-numbers": lambda e: (
        numbers(answer_of(e.target)) == sorted(numbers(" ".join(body(e)))),
        len(numbers(answer_of(e.target))),
    ),
    "summation": check_summation,
    "parity": check_parity,
    "lego": check_lego,
    "lego-ordered": check_lego,
    "scan": check_scan,
    "pcfg": check_pcfg,
}


@pytest.mark.parametrize("name", TASKS)
def test_targets_are_correct_of_their_length_and_in_the_vocabulary(name):
    task, words = TASKS[name], set()
    for example in examples(task):
        correct, length = CHECKS[name](example)
        assert correct, example
        assert length == example.length
        for text in (example.input, example.target):
            assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
            words |= set(text.split())
    assert words == set(task.vocabulary), "every word of the vocabulary occurs, and no other"


def test_one_vocabulary_serves_all_tasks():
    assert len(TOKENIZER) == len(set(TOKENIZER.vocabulary)) < 1024
    assert TOKENIZER.vocabulary[: len(SPECIAL_TOKENS)] == SPECIAL_TOKENS
    assert [
        TOKENIZER.vocabulary[mark]
        for mark in (TOKENIZER.pad, TOKENIZER.begin, TOKENIZER.answer, TOKENIZER.end)
    ] == [*SPECIAL_TOKENS]
    example = Example("Copy w07 .", "w07", 1)
    assert (
        TOKENIZER.decode(TOKENIZER.prompt(example) + TOKENIZER.target(example)) == "Copy w07 . w07"
    )
    assert TOKENIZER.prompt(example)[0] == TOKENIZER.begin
    assert TOKENIZER.target(example)[-1] == TOKENIZER.end
    with pytest.raises(FarspanError, match="'zebra' is not in the vocabulary"):
        TOKENIZER.encode("Copy zebra .")


@pytest.mark.parametrize("name", TASKS)
def test_examples_depend_on_length_and_generator_only(name):
    task = TASKS[name]
    one, other = (task.make(task.train[1], np.random.default_rng(3)) for _ in range(2))
    assert one == other
    assert one.length == task.train[1]


SMALL = [
    ("parity", 3),
    ("summation", 2),
    ("addition", 1),
    ("polynomial", 1),
    ("copy-repeat", 9),
    ("copy-replace", 3),
    ("copy", 1),
    ("lego", 2),
    ("lego-ordered", 2),
    ("scan", 2),
    ("reverse-numbers", 1),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "length"), SMALL)
def test_count_is_the_number_of_distinct_examples(name, length):
    task, rng = TASKS[name], np.random.default_rng(0)
    count = task.count(length)
    distinct = {task.make(length, rng).input for _ in range(int(count * (np.log(count) + 4)))}
    assert len(distinct) == count


COUNTS = {  # of two items, by the sizes of the sets that they are drawn from
    **dict.fromkeys(("copy", "copy-next", "copy-double"), 100**2),
    **dict.fromkeys(("reverse", "reverse-double", "reverse-copy"), 100**2),
    **dict.fromkeys(("copy-repeat", "copy-repeat-double"), 100),
    "copy-replace": 100 * 99,
    "reverse-numbers": 90**2,  # numbers of two digits
    "addition": 100**2 - 10**2,  # pairs below 100, less those below 10
    "polynomial": 5 * (7 * 4) ** 2,  # x, and a coefficient and a power for each term
    "sorting": 50**2,
    "sorting-numbers": 9990**2,  # numbers of two to four digits
    "summation": 9**2,
    "parity": 2**2,
    "lego": 2 * 26 * 25 * 2**2,  # orders, names and signs; the second name is asked for
    "lego-ordered": 26 * 25 * 2**2,
    "scan": 88,
    "pcfg": np.inf,
}


@pytest.mark.parametrize("name", TASKS)
def test_counts_follow_from_the_alphabets(name):
    assert TASKS[name].count(2) == COUNTS[name]


@pytest.mark.parametrize("name", TASKS)
def test_lengths_and_their_frequencies_are_those_of_kazemnejad_2023(name):
    """Tests are up to twice as long as examples to train on; SCAN and PCFG have released splits."""
    task = TASKS[name]
    usual = ((1, 8), (9, 16)) if task.group == "reasoning" else ((2, 20), (21, 40))
    released = {"scan": ((1, 25), (26, 48)), "pcfg": ((1, 8), (9, 35))}
    assert (task.train, task.test) == released.get(name, usual)
    assert task.count(task.train[1]) > 0
    frequencies = {"addition": 2 * 2 - 1, "scan": COUNTS["scan"], "pcfg": pcfg.RELEASED[2]}
    assert task.frequency(2) == frequencies.get(name, 1)


def test_a_first_digit_of_0_becomes_any_other():
    """Then all numbers of a size are equally likely: each first digit has 1/10 + 1/10 · 1/9."""
    again = Counter(
        str(_number(2, np.random.default_rng(seed)))[0]
        for seed in range(1_000)
        if np.random.default_rng(seed).integers(10, size=2)[0] == 0
    )
    assert set(again) == set("123456789")
    assert chisquare(list(again.values())).pvalue > 1e-3


def test_lengths_are_drawn_evenly_unless_the_released_frequencies_are_asked_for():
    task = TASKS["addition"]
    assert length_weights(task, (2, 5), even=True) == {2: 1, 5: 1}
    assert length_weights(task, (2, 5), even=False) == {2: 3, 5: 9}
    for split in make_splits(task, 28, 14, seed=0, train=(2, 8), test=(9, 15)):
        assert set(Counter(example.length for example in split).values()) == {len(split) / 7}


def test_draws_are_distinct_balanced_and_repeatable():
    task = TASKS["addition"]
    drawn = draw_examples(task, (3, 6), 402, seed=5)
    assert drawn == draw_examples(task, (3, 6), 402, seed=5)
    assert drawn != draw_examples(task, (3, 6), 402, seed=6)
    assert len({example.input for example in drawn}) == 402
    assert sorted(Counter(example.length for example in drawn).values()) == [100, 100, 101, 101]
    others = draw_examples(task, (3, 6), 402, seed=5, exclude=drawn)
    assert not {example.input for example in others} & {example.input for example in drawn}


def test_drawing_more_than_exist_returns_all_and_warns(caplog):
    drawn = draw_examples(TASKS["parity"], (1, 3), 1000, seed=0)
    assert len({example.input for example in drawn}) == len(drawn) == 2 + 4 + 8
    assert "parity has only 14 distinct examples" in caplog.text
    rest = draw_examples(TASKS["parity"], (1, 3), 1000, seed=0, exclude=drawn[:5])
    assert {example.input for example in rest} == {example.input for example in drawn[5:]}


@pytest.mark.parametrize(("name", "lengths"), [("addition", (2, 8)), ("addition", (9, 16))])
def test_pairs_of_operand_sizes_are_equally_frequent(name, lengths):
    """The released code draws as many sums for every pair of sizes with an operand in range."""
    low, high = lengths
    pairs = [pair for pair in product(range(1, high + 1), repeat=2) if max(pair) >= low]
    drawn = draw_examples(TASKS[name], lengths, 100 * len(pairs), seed=0, even_lengths=False)
    counts = Counter(
        tuple(len(operand.split()) for operand in " ".join(body(example)).split(" + "))
        for example in drawn
    )
    assert set(counts) == set(pairs)
    expected = [100] * len(pairs)
    assert chisquare([counts[pair] for pair in pairs], expected).pvalue > 1e-3


def test_lengths_are_as_frequent_as_in_the_released_data():
    by_actions = Counter(len(scan.actions(command)) for command in scan.commands())
    drawn = Counter(
        example.length
        for example in draw_examples(TASKS["scan"], (26, 48), 1568, 0, even_lengths=False)
    )
    assert all(abs(drawn[length] - by_actions[length] / 2) <= 1 for length in range(26, 49))
    lego = Counter(
        example.length
        for example in draw_examples(TASKS["lego"], (1, 8), 700, 0, even_lengths=False)
    )
    assert lego == dict.fromkeys(range(2, 9), 100), "the released code draws LEGO evenly"
    with pytest.raises(FarspanError, match="the released data of pcfg have no example of 33 to 34"):
        draw_examples(TASKS["pcfg"], (33, 34), 1, 0, even_lengths=False)


def test_splits_are_drawn_by_the_frequencies_of_the_released_data():
    splits = make_splits(TASKS["addition"], 6_400, 640, seed=0, even_lengths=False)
    for split, n, lengths in zip(splits, (6_400, 640, 640), ((1, 8), (1, 8), (9, 16)), strict=True):
        counts, total = Counter(example.length for example in split), len(split)
        assert total == n
        pairs = sum(2 * length - 1 for length in range(lengths[0], lengths[1] + 1))
        for length in range(lengths[0] + 1, lengths[1] + 1):  # there are 90 sums of one digit
            assert counts[length] == pytest.approx(n * (2 * length - 1) / pairs, abs=2, rel=0.02)


def test_lego_asks_for_the_second_half():
    """As in the released code: the middle of an odd chain belongs to the first half."""
    for name in ("lego", "lego-ordered"):
        assert not TASKS[name].count(1)
        for length, steps in ((2, {2}), (5, {4, 5}), (6, {4, 5, 6})):
            rng, asked = np.random.default_rng(0), set()
            for _ in range(60):
                words = TASKS[name].make(length, rng).input.partition(" . ")
                bases = {c[0]: c[-1] for c in words[0].removeprefix("If ").split(" , ")}
                name_asked, depth = words[2].split()[-2], 0
                while name_asked != "1":
                    name_asked, depth = bases[name_asked], depth + 1
                asked.add(depth)
            assert asked == steps


def test_the_signs_of_lego_are_equally_frequent():
    rng = np.random.default_rng(0)
    chains = [TASKS["lego"].make(8, rng).input for _ in range(300)]
    signs = Counter(re.findall(r"= ([+-]) ", " ".join(chains)))
    assert sum(signs.values()) == 2400
    assert signs["+"] == pytest.approx(1200, abs=4 * (2400 / 4) ** 0.5)


def test_tasks_name_their_counterparts():
    groups = Counter(task.group for task in TASKS.values())
    assert groups == {"primitive": 8, "reasoning": 8, "classical": 2, "": 2}
    assert {task.group for task in TASKS.values()} <= {*GROUPS, ""}
    own = {name for name, task in TASKS.items() if not task.group}
    assert own == {"copy-next", "reverse-numbers"}


def test_the_page_lists_every_task_with_its_group():
    page = (Path(__file__).parent.parent / "docs" / "lab.md").read_text()
    table = page[page.index("| task | name in the released code |") :].partition("\n\n")[0]
    listed = {}
    for row in table.splitlines()[2:]:
        names, counterpart, *_, group = (cell.strip() for cell in row.strip("|").split("|"))
        assert (counterpart == "none: ours") == (group == ""), names
        listed |= dict.fromkeys(re.findall(r"`([\w-]+)`", names), group)
    assert listed == {name: task.group for name, task in TASKS.items()}


@given(
    st.integers(1, 500),
    st.dictionaries(
        st.integers(1, 30), st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=1
    ),
)
def test_quotas_follow_weights_where_examples_suffice(n, lengths):
    available = {length: size for length, (size, _) in lengths.items()}
    weights = {length: weight for length, (_, weight) in lengths.items()}
    quotas = _balance(n, available, weights)
    assert sum(quotas.values()) == min(n, sum(available.values()))
    assert all(quota <= available[length] for length, quota in quotas.items())
    share = max(quota / weights[length] for length, quota in quotas.items())
    assert all(
        quota == available[length] or quota >= share * weights[length] - weights[length] - 1
        for length, quota in quotas.items()
    )


@given(st.integers(1, 500), st.dictionaries(st.integers(1, 30), st.integers(0, 60), min_size=1))
def test_quotas_are_balanced_over_lengths(n, available):
    quotas = _balance(n, available, dict.fromkeys(available, 1))
    assert sum(quotas.values()) == min(n, sum(available.values()))
    most = max(quotas.values())
    assert all(quota <= available[length] for length, quota in quotas.items())
    assert all(quota >= most - 1 or quota == available[length] for length, quota in quotas.items())


@pytest.mark.parametrize("name", TASKS)
def test_splits_are_disjoint(name):
    task = TASKS[name]
    splits = make_splits(task, 600, 60, seed=1)
    inputs = [{example.input for example in split} for split in splits]
    for distinct, split in zip(inputs, splits, strict=True):
        assert len(distinct) == len(split) > 0
    assert len(set.union(*inputs)) == sum(map(len, inputs))
    for split, (low, high) in zip(splits, (task.train, task.train, task.test), strict=True):
        assert all(low <= example.length <= high for example in split)
    held_out = Counter(example.length for example in splits.held_out)
    assert all(count <= 0.1 * task.count(length) for length, count in held_out.items())


def test_splits_of_lengths_whose_count_overflows_a_float():
    splits = make_splits(TASKS["copy"], 4, 2, seed=0, train=(299, 300), test=(301, 302))
    assert [len(split) for split in splits] == [4, 2, 2]


@pytest.mark.parametrize("shortest", [8, 9])
def test_test_lengths_may_begin_after_the_train_lengths(shortest, caplog):
    make_splits(TASKS["copy"], 5, 5, seed=0, train=(2, 8), test=(shortest, 12))
    assert ("are not all longer" in caplog.text) == (shortest == 8)


def test_overlapping_test_lengths_are_warned_of(caplog):
    splits = make_splits(TASKS["copy"], 50, 50, seed=0, train=(2, 8), test=(5, 12))
    assert "are not all longer" in caplog.text
    assert not {example.input for example in splits.train} & {
        example.input for example in splits.beyond
    }


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_task("adition"), "task 'adition' is unknown; did you mean addition"),
        (lambda: find_task("?"), "choose one of copy, copy-repeat"),
        (lambda: draw_examples(TASKS["copy"], (5, 2), 1, 0), "lengths 5:2 are not a range"),
        (lambda: draw_examples(TASKS["copy"], (0, 2), 1, 0), "lengths 0:2 are not a range"),
        (
            lambda: draw_examples(TASKS["lego"], (27, 30), 1, 0),
            "lego has no example of 27 to 30 clauses",
        ),
        (
            lambda: draw_examples(TASKS["scan"], (23, 23), 1, 0),
            "scan has no example of 23 to 23 actions",
        ),
        (lambda: draw_examples(TASKS["copy"], (1, 2), 0, 0), "choose at least 1 example"),
        (lambda: draw_examples(TASKS["copy"], (1, 2), 1, -1), "a seed from 0 on"),
        (
            lambda: TASKS["lego"].make(27, np.random.default_rng(0)),
            "27 clauses are too many; choose at most 26",
        ),
        (
            lambda: TASKS["scan"].make(23, np.random.default_rng(0)),
            "no command of scan has 23 actions",
        ),
        (
            lambda: pcfg.expression(70, np.random.default_rng(0)),
            "70 functions does not fit in 71 words",
        ),
        (lambda: pcfg.evaluate("copy A1 , B1"), "',' is left over"),
        (lambda: pcfg.evaluate("append A1 B1"), "a string is missing"),
        (lambda: pcfg.evaluate("append A1 ,"), "a string is missing"),
        (lambda: pcfg.evaluate(""), "a string is missing"),
        (
            lambda: TOKENIZER.encode("Compute 32 + 3 ?"),
            "put spaces between words and between digits",
        ),
    ],
)
def test_invalid_requests_are_refused(call, message):
    with pytest.raises(FarspanError, match=re.escape(message)):
        call()


def test_scan_splits_have_the_sizes_of_the_papers():
    """SCAN's authors: at most 22 actions, 16,990 and 3,920. Kazemnejad 2023: at most 25,
    of which nine tenths train."""
    count = TASKS["scan"].count
    assert sum(map(count, range(1, 23))) == 16_990
    assert sum(map(count, range(23, 49))) == 3_920
    assert sum(map(count, range(1, 26))) == 17_774 == 15_997 + 1_777
    assert sum(map(count, range(26, 49))) == 3_136
    assert not any(map(count, range(49, 200)))


@pytest.mark.long
def test_pcfg_expressions_have_released_sizes():
    rng = np.random.default_rng(0)
    for functions in (*range(1, 36), 44, 57, 69):  # beyond 35, few binary functions fit
        for _ in range(4 if functions < 36 else 1):
            text, value = pcfg.expression(functions, rng)
            words = text.split()
            assert sum(word in pcfg.UNARY or word in pcfg.BINARY for word in words) == functions
            assert len(words) <= 71
            assert 2 <= len(value) <= 128


def test_pcfg_functions_of_one_symbol():
    """By the definitions of Hupkes 2020: swapping or shifting one symbol leaves it."""
    for name, value in {"swap_first_last": "A1", "shift": "A1", "echo": "A1 A1"}.items():
        assert pcfg.evaluate(f"{name} A1") == tuple(value.split())


def test_pcfg_counts_examples_where_expressions_can_be_drawn():
    for functions in (0, 1, 2, 69, 70):
        possible = TASKS["pcfg"].count(functions) > 0
        assert possible == (1 <= functions <= 69)
        if possible:
            assert pcfg.expression(functions, np.random.default_rng(0))
        else:
            with pytest.raises(FarspanError, match="choose 1 to 69"):
                pcfg.expression(functions, np.random.default_rng(0))


def test_long_pcfg_expressions_keep_their_binary_functions():
    """Most draws of 25 functions are too long, and are drawn again by the same shares."""
    rng = np.random.default_rng(0)
    texts = [pcfg.expression(25, rng)[0].split() for _ in range(30)]
    binary = [sum(word in pcfg.BINARY for word in words) for words in texts]
    assert min(binary) >= 1
    assert np.mean(binary) > 4


def test_pcfg_is_that_of_hupkes_2020():
    """520 symbols in strings of 2 to 5; 81,010 examples of up to 8 functions, 11,333 of more."""
    assert set(pcfg.SYMBOLS) == {f"{chr(65 + n // 20)}{n % 20 + 1}" for n in range(520)}
    assert {*pcfg.RELEASED} == {*range(1, 31), 32, 35}
    assert sum(pcfg.RELEASED[functions] for functions in range(1, 9)) == 81_010
    assert sum(pcfg.RELEASED.values()) == 81_010 + 11_333
    rng, sizes, binary = np.random.default_rng(0), Counter(), 0
    for _ in range(300):
        words = pcfg.expression(3, rng)[0].split()
        binary += sum(word in pcfg.BINARY for word in words)
        names = "|".join((*pcfg.UNARY, *pcfg.BINARY, ","))
        strings = re.split(rf"(?: ?\b(?:{names})\b|,) ?", " ".join(words))
        sizes.update(len(string.split()) for string in strings if string.strip())
    assert set(sizes) == {2, 3, 4, 5}
    assert binary / 900 == pytest.approx(0.4, abs=0.06)  # 3.7 standard errors


@pytest.fixture(scope="module")
def bench():
    """The files of SCAN and PCFG SET, by name."""
    archive = DATA / "bench.tar.xz"
    if not archive.exists():
        pytest.skip(f"needs {archive.name}")
    with tarfile.open(archive) as file:
        return {
            member.name: file.extractfile(member).read().decode()
            for member in file
            if member.name == "bench/scan/tasks.txt"
            or re.fullmatch(r"bench/pcfg_set/.*\.jsonl", member.name)
        }


def test_scan_equals_the_released_data(bench):
    released = [
        line.removeprefix("IN: ").split(" OUT: ")
        for line in bench["bench/scan/tasks.txt"].splitlines()
    ]
    ours = {command: " ".join(scan.actions(command)) for command in scan.commands()}
    assert len(ours) == len(list(scan.commands())) == len(released) == 20_910
    assert ours == dict(released)


@pytest.mark.long
def test_pcfg_interpreter_agrees_with_the_released_data(bench):
    pairs = [
        json.loads(line)
        for name, text in bench.items()
        if "pcfg" in name
        for line in text.splitlines()
    ]
    assert len(pairs) == 4_860 + 9_721 + 11_333 + 10_175 + 79_077
    wrong = [pair for pair in pairs if " ".join(pcfg.evaluate(pair["src"])) != pair["tgt"]]
    assert not wrong


def test_pcfg_lengths_agree_with_the_released_data(bench):
    def functions(name: str) -> Counter[int]:
        sources = [json.loads(line)["src"] for line in bench[f"bench/pcfg_set/{name}"].splitlines()]
        names = {*pcfg.UNARY, *pcfg.BINARY}
        return Counter(sum(word in names for word in source.split()) for source in sources)

    longer = functions("test_productivity.jsonl")
    assert {length: pcfg.RELEASED[length] for length in longer} == longer
    assert sum(pcfg.RELEASED.get(length, 0) for length in range(9, 36)) == 11_333
    random = functions("dev_iid.jsonl") + functions("test_iid.jsonl")
    total = sum(random[length] for length in range(1, 9))
    for length in range(1, 9):
        assert pcfg.RELEASED[length] == round(81_010 * random[length] / total)


@pytest.mark.parametrize("name", ["lego", "lego-ordered"])
def test_lego_uses_every_letter(name):
    example = TASKS[name].make(26, np.random.default_rng(0))
    assert {word for word in example.input.split() if word.isalpha() and len(word) == 1} == set(
        "abcdefghijklmnopqrstuvwxyz"
    )
