"""LongBench's metrics as its authors' code computes them: 0 to 1 for a prediction and an answer.

They have particular definitions. ROUGE-L is that of the package `rouge`, which compares sentences
and counts each word once. Edit similarity is `fuzz.ratio` without python-Levenshtein, that is
difflib's ratio in whole percent. Scores by other definitions would not compare to published ones.
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
NON_CODE_MARKS = ("`", "#", "//")  # a line with one of these is a fence or a comment


def f1(prediction: str, answer: str) -> float:
    """F1 over words, ignoring case, punctuation and articles."""
    predicted, expected = _normalized_words(prediction), _normalized_words(answer)
    common = (Counter(predicted) & Counter(expected)).total()
    return 2 * common / (len(predicted) + len(expected)) if common else 0.0


def _normalized_words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def rouge_l(prediction: str, answer: str) -> float:
    """F1 of the distinct words in the longest common subsequences of all sentence pairs.

    Two artifacts of the package are not reproduced: it adds 1e-8 to a denominator, and where its
    recursion overflows (some thousand words without a full stop) LongBench scores 0.
    """
    predicted, expected = _sentences(prediction), _sentences(answer)
    if not predicted or not expected:
        return 0.0
    common = set().union(*(lcs_words(right, words) for right in expected for words in predicted))
    return 2 * len(common) / (len(set().union(*predicted)) + len(set().union(*expected)))


def _sentences(text: str) -> list[list[str]]:
    """Words between full stops. As in the package, white space alone counts as one empty word."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def lcs_words(reference: Sequence[str], words: Sequence[str]) -> set[str]:
    """The words of a longest common subsequence; ties are resolved by dropping from `words` first.

    The table is walked from the end, as the package does.
    """
    # lengths[i][j]: of the subsequence of the first i of `reference` and the first j of `words`
    lengths = [[0] * (len(words) + 1)]
    for expected in reference:
        above, row = lengths[-1], [0]
        for j, word in enumerate(words):
            row.append(above[j] + 1 if expected == word else max(above[j + 1], row[j]))
        lengths.append(row)
    common, i, j = set(), len(reference), len(words)
    while i and j:
        if reference[i - 1] == words[j - 1]:
            common.add(reference[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return common


def class_match(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 / (number of classes in the prediction) if the right one is among them, else 0."""
    matched, index = [name for name in classes if name in prediction], 0
    while index < len(matched):
        if matched[index] in answer and matched[index] != answer:
            del matched[index]  # the next one moves up and is skipped, as in the authors' loop
        index += 1
    return 1 / len(matched) if answer in matched else 0.0


def count(prediction: str, answer: str) -> float:
    """The share of the numbers in the prediction that are right."""
    numbers = NUMBER.findall(prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """The share of the numbers in the prediction that are the right paragraph's."""
    return count(prediction, PARAGRAPH.findall(answer)[0])


def edit_similarity(prediction: str, answer: str) -> float:
    """The similarity of the first line of code to the answer: difflib's ratio in whole percent."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in NON_CODE_MARKS)), "")
    if line == answer:
        return 1.0
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100
