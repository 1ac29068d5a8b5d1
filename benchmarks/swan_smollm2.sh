#!/usr/bin/env bash
# The conversion of SmolLM2-135M in docs/results/swan.md, from the released file to its records.
#
#     benchmarks/swan_smollm2.sh SmolLM2-135M-Instruct.Q4_1.gguf path/to/data OUT [swan.tokens=…]
#
# path/to/data has the corpora of docs/corpora.md. Rerun to resume: a finished step is not repeated.
# Settings after OUT go to `farspan extend --method swan`. STEPS chooses steps, by default the first
# three:
#
# extend  OUT/swan and OUT/headlog, the conversion. OUT/times.txt has the seconds.
# judge   OUT/64k.json and OUT/128k.json, lines for docs/records/swan-smollm2.jsonl.
# needles OUT/needles: one needle, and one of four
# ruler   OUT/ruler-*: base and conversion, as completion and as chat; needs the haystack ESSAYS, a
#         JSON Lines file of Paul Graham's essays. OUT/ruler-*.txt is what each of them prints.
# yarn    OUT/yarn and OUT/ruler-yarn: the same for an extension by YaRN, as completion
#
# For a trial of the script on a CPU: rope-twin as the model, TO=1024 FAR=2048 SHORTEST=256
# WINDOWS=2 KEYS=1 LIMIT=2 BOOK=20000 and swan.tokens=16384.
set -euo pipefail
model=$1 data=$2 out=$3
shift 3
TO=${TO:-65536} FAR=${FAR:-131072} SHORTEST=${SHORTEST:-1024}
FIT=${FIT:-$FAR} # the length that scales are fitted on
WINDOWS=${WINDOWS:-27} FAR_WINDOWS=${FAR_WINDOWS:-64} # books of each text, for TO and FAR
KEYS=${KEYS:-20} LIMIT=${LIMIT:-50} SAMPLES=${SAMPLES:-20}
BOOK=${BOOK:-330000} # characters of a book that has FAR tokens
STEPS=${STEPS:-extend judge needles}
FARSPAN=${FARSPAN:-farspan} PYTHON=${PYTHON:-python}
here=$(dirname "$0")
mkdir -p "$out"

# 12 long books choose, the next 100 judge, or as many as there are; no step of training reads them.
[ -e "$out/rest.jsonl" ] || $PYTHON - "$data" "$out" "$BOOK" <<'PYTHON'
import itertools, json, lzma, sys
from pathlib import Path

data, out, characters = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
with lzma.open(data / "books_train_b.jsonl.xz", "rt", encoding="utf-8") as lines:
    long = (line for line in lines if len(json.loads(line)["text"]) > characters)
    for name, count in (("choose", 12), ("rest", 100)):
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
extend() { # FOLDER MODEL OPTIONS…
    [ -e "$out/$1/patch.json" ] && return
    local start=$SECONDS
    $FARSPAN extend "$2" -o "$out/$1" "${splits[@]}" report_windows=2 passkeys=0 "${@:3}"
    echo "$1 took $((SECONDS - start)) s" | tee -a "$out/times.txt"
}

judge() { # FILE OPTIONS…
    [ -e "$out/$1" ] || $PYTHON "$here/conversion.py" "$out/headlog" --out "$out/$1" \
        --text "$data/books_val.jsonl.xz" --text "$data/pg19_test_a.jsonl.xz" \
        --text "$out/rest.jsonl" --group 64k "${@:2}"
}

ruler() { # NAME MODEL OPTIONS…
    local folder=$out/ruler-$1
    $FARSPAN eval "$2" --suite ruler --lengths "$SHORTEST:$TO" --limit "$SAMPLES" \
        --data "haystack=${ESSAYS:?the file of the essays}" -o "$folder" "${@:3}" \
        > "$folder.txt" 2>&1 || { echo "RULER failed, see $folder.txt" >&2 && return 1; }
}

for step in $STEPS; do
    case $step in
        extend)
            extend swan "$model" --to "$TO" --method swan swan.facts=0.25 swan.short=0.25 \
                swan.tokens=48000000 choose_windows=2 "$@"
            extend headlog "$out/swan" --to "$FIT" --method headlog search.beyond=1.0 \
                search.micro_batch=1 search.quick=true search.passkeys=0 choose_windows=4
            ;;
        judge)
            judge 64k.json --longest "$TO" --shortest "$SHORTEST" --windows "$WINDOWS" \
                --keys "$KEYS"
            judge 128k.json --longest "$FAR" --shortest $((FAR / 16)) --windows "$FAR_WINDOWS" \
                --keys $(((KEYS + 3) / 4))
            ;;
        needles)
            $FARSPAN eval "$out/headlog" --suite needle --tasks single,multi-key \
                --lengths "$SHORTEST:$TO" --data "haystack=$data/pg19_test_a.jsonl.xz" \
                --limit "$LIMIT" -o "$out/needles"
            ;;
        ruler) # processes that share the GPU
            pids=() failed=0
            ruler swan "$out/headlog" & pids+=($!)
            ruler swan-chat "$out/headlog" --apply-chat-template & pids+=($!)
            ruler base "$model" & pids+=($!)
            ruler base-chat "$model" --apply-chat-template & pids+=($!)
            for pid in "${pids[@]}"; do wait "$pid" || failed=$?; done
            [ "$failed" = 0 ] || exit "$failed"
            ;;
        yarn)
            extend yarn "$model" --to "$TO" --method yarn choose_windows=2
            ruler yarn "$out/yarn"
            ;;
        *) echo "unknown step $step" >&2 && exit 2 ;;
    esac
done
