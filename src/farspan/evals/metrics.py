"""LongBench's metrics as its authors' code computes them: 0 to 1 for what a model said against one right answer.

They are particular. ROUGE-L is that of the package `rouge`, which compares sentences and counts each word once; edit
similarity is `fuzz.ratio` without python-Levenshtein, which is difflib's ratio in whole percent. A score by another
definition could not be compared with published ones.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Sequence

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
NUMBER = re.compile(r"\d+")
PARAGRAPH = re.compile(r"Paragraph (\d+)")
NO_CODE = ("`", "#", "//")  # a line with one of these is a fence or a comment


def f1(said: str, answer: str) -> float:
    """Words in common, without case, punctuation and articles."""
    words, right = _plain(said), _plain(answer)
    common = (Counter(words) & Counter(right)).total()
    return 2 * common / (len(words) + len(right)) if common else 0.0


def _plain(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def rouge_l(said: str, answer: str) -> float:
    """F of the words that are in a longest common subsequence of any two sentences, each word counted once.

    The package adds 1e-8 to a denominator, and where its recursion overflows, some thousand words without a full stop,
    LongBench scores 0. Neither is done here.
    """
    ours, theirs = _sentences(said), _sentences(answer)
    if not ours or not theirs:
        return 0.0
    common = set().union(*(common_words(right, words) for right in theirs for words in ours))
    return 2 * len(common) / (len(set().union(*ours)) + len(set().union(*theirs)))


def _sentences(text: str) -> list[list[str]]:
    """Words between full stops; white space between two of them is one empty word, as it is there."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def common_words(right: Sequence[str], words: Sequence[str]) -> set[str]:
    """The words of a longest common subsequence; of several, the one found from the end by giving up `words` first."""
    longest = [[0] * (len(words) + 1)]  # [i][j]: of the first i of `right` and the first j of `words`
    for one in right:
        above, row = longest[-1], [0]
        for j, other in enumerate(words):
            row.append(above[j] + 1 if one == other else max(above[j + 1], row[j]))
        longest.append(row)
    found, i, j = set(), len(right), len(words)
    while i and j:
        if right[i - 1] == words[j - 1]:
            found.add(right[i - 1])
            i, j = i - 1, j - 1
        elif longest[i - 1][j] > longest[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def class_match(said: str, answer: str, classes: Sequence[str]) -> float:
    """One over the number of classes named, if the right one is among them."""
    named, at = [name for name in classes if name in said], 0
    while at < len(named):
        if named[at] in answer and named[at] != answer:
            del named[at]  # the next moves up and is passed over, as in the authors' loop
        at += 1
    return 1 / len(named) if answer in named else 0.0


def count(said: str, answer: str) -> float:
    """The share of the right number among the numbers said."""
    numbers = NUMBER.findall(said)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(said: str, answer: str) -> float:
    """The share of the right paragraph's number among the numbers said."""
    return count(said, PARAGRAPH.findall(answer)[0])


def edit_similarity(said: str, answer: str) -> float:
    """How alike the first line of code and the right one are: difflib's ratio, in whole percent."""
    lines = said.lstrip("\n").split("\n")
    first = next((line for line in lines if not any(mark in line for mark in NO_CODE)), "")
    return 1.0 if first == answer else round(100 * difflib.SequenceMatcher(None, first, answer).ratio()) / 100
