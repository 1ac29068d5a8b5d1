#!/usr/bin/env bash
# The conversion of SmolLM2-135M in docs/results/swan.md, from the released file to its records.
#
#     benchmarks/swan_smollm2.sh SmolLM2-135M-Instruct.Q4_1.gguf path/to/data OUT [swan.tokens=…]
#
# path/to/data has the corpora of docs/corpora.md. OUT/64k.json and OUT/128k.json are lines for
# docs/records/swan-smollm2.jsonl. The two extensions took 14 minutes on an H200 that other training
# shared, and six with 40M tokens and FIT=65536. Rerun to resume: a finished step is not repeated.
# Settings after OUT go to `farspan extend --method swan`.
#
# For a trial of the script on a CPU: rope-twin as the model, TO=1024 FAR=2048 SHORTEST=256
# WINDOWS=2 KEYS=1 LIMIT=2 BOOK=20000 and swan.tokens=16384.
set -euo pipefail
model=$1 data=$2 out=$3
shift 3
TO=${TO:-65536} FAR=${FAR:-131072} SHORTEST=${SHORTEST:-1024}
FIT=${FIT:-$FAR} # the length that scales are fitted on
WINDOWS=${WINDOWS:-27} KEYS=${KEYS:-20} LIMIT=${LIMIT:-50}
BOOK=${BOOK:-330000} # characters of a book that has FAR tokens
FARSPAN=${FARSPAN:-farspan} PYTHON=${PYTHON:-python}
here=$(dirname "$0")
mkdir -p "$out"

# 12 long books choose, the next 30 judge; no step of training reads either.
[ -e "$out/rest.jsonl" ] || $PYTHON - "$data" "$out" "$BOOK" <<'PYTHON'
import itertools, json, lzma, sys
from pathlib import Path

data, out, characters = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
with lzma.open(data / "books_train_b.jsonl.xz", "rt", encoding="utf-8") as lines:
    long = (line for line in lines if len(json.loads(line)["text"]) > characters)
    for name, count in (("choose", 12), ("rest", 30)):
        (out / f"{name}.jsonl").write_text("".join(itertools.islice(long, count)), encoding="utf-8")
PYTHON

cat > "$out/mix.toml" <<TOML
[sources.books]
files = "$(realpath "$data")/books_train_a.jsonl.xz"
weight = 0.75
[sources.code]
files = "$(realpath "$data")/code_train.jsonl.xz"
weight = 0.14
[sources.math]
files = "$(realpath "$data")/math_train.jsonl.xz"
weight = 0.11
TOML

splits=(--data "search=$out/mix.toml" --data "choose=$out/choose.jsonl"
    --data "report=$data/books_val.jsonl.xz")
[ -e "$out/swan/patch.json" ] || $FARSPAN extend "$model" --to "$TO" --method swan -o "$out/swan" \
    "${splits[@]}" swan.facts=0.25 swan.short=0.25 swan.tokens=48000000 \
    choose_windows=2 report_windows=2 passkeys=0 "$@"
[ -e "$out/headlog/patch.json" ] || $FARSPAN extend "$out/swan" --to "$FIT" --method headlog \
    -o "$out/headlog" "${splits[@]}" search.beyond=1.0 search.micro_batch=1 choose_windows=4 \
    report_windows=2 passkeys=0

texts=(--text "$data/books_val.jsonl.xz" --text "$data/pg19_test_a.jsonl.xz"
    --text "$out/rest.jsonl" --windows "$WINDOWS" --group 64k)
[ -e "$out/64k.json" ] || $PYTHON "$here/conversion.py" "$out/headlog" "${texts[@]}" \
    --longest "$TO" --shortest "$SHORTEST" --keys "$KEYS" --out "$out/64k.json"
[ -e "$out/128k.json" ] || $PYTHON "$here/conversion.py" "$out/headlog" "${texts[@]}" \
    --longest "$FAR" --shortest $((FAR / 16)) --keys $(((KEYS + 3) / 4)) --out "$out/128k.json"
$FARSPAN eval "$out/headlog" --suite needle --tasks single,multi-key --lengths "$SHORTEST:$TO" \
    --data "haystack=$data/pg19_test_a.jsonl.xz" --limit "$LIMIT" -o "$out/needles"
