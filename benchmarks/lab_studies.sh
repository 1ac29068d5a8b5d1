#!/usr/bin/env bash
# The studies of position encodings in docs/results/tasks.md, on one GPU.
#
#     benchmarks/lab_studies.sh OUT
#
# Every step trains the missing models of `farspan lab run lab-STEP` in OUT/STEP. Then it writes the
# tables, figure and record of the finished ones there, and their lines for docs/records to
# OUT/records/lab-STEP.jsonl. Rerun to resume: a model is a cell, and finished cells stay.
#
# STEPS chooses steps: grid encodings scratchpad attention. `attention` also compares its models by
# `farspan lab distance`, in OUT/distance. TASKS="addition summation" trains these tasks only, one
# after the other, so that the first are finished if the time ends. LIMIT is the number of seconds
# after which training stops; the models in training are lost, and the exit code is 75.
# JOBS processes share the GPU; run them under MPS. SETTINGS are key=value settings of all steps,
# as SETTINGS="seeds=[0]"; rerun without it for the other seeds.
# For a trial on a CPU: SETTINGS="seeds=[0] sizes.small.width=32 train.steps=2 …" and WINDOWS=12,
# the examples whose attention is compared.
set -euo pipefail
out=$(realpath -m "$1")
STEPS=${STEPS:-grid encodings scratchpad attention} TASKS=${TASKS:-} SETTINGS=${SETTINGS:-}
LIMIT=${LIMIT:-1000000} JOBS=${JOBS:-1} FARSPAN=${FARSPAN:-farspan} PYTHON=${PYTHON:-python}
mkdir -p "$out/logs" "$out/records"
stopped=0

say() { echo "$(date +%T) $*" | tee -a "$out/logs/times.txt"; }

train() { # STEP KEY=VALUE…
    local step=$1 code=0 left=$((LIMIT - SECONDS))
    shift
    if [ "$left" -gt 0 ]; then
        # shellcheck disable=SC2086
        timeout --preserve-status "$left" $FARSPAN lab run "lab-$step" $SETTINGS "$@" \
            "processes=$JOBS" -o "$out/$step" >> "$out/logs/$step.txt" 2>&1 || code=$?
    else
        code=75
    fi
    say "lab-$step $*: exit code $code"
    case $code in
        75 | 143) stopped=75 ;; # 143: it was stopped while it started
        *) return "$code" ;;
    esac
}

report() { # STEP
    # shellcheck disable=SC2086
    $FARSPAN lab run "lab-$1" $SETTINGS -o "$out/$1" --report-only > "$out/logs/$1-report.txt"
    say "lab-$1: $(head -1 "$out/$1/tables.md")"
    $PYTHON - "$out/$1/record.json" > "$out/records/lab-$1.jsonl" <<'PYTHON'
import json
import sys

record = json.load(open(sys.argv[1]))
study = record["settings"]["study"]
for cell in record["cells"]:
    steps = study["steps"].get(cell["task"], study["train"]["steps"])
    left_out = {"size", "scaled"} | ({"scratchpad"} if cell["scratchpad"] == "none" else set())
    line = {**cell, "steps": steps, "loss": cell["loss"][-1]}
    print(json.dumps({key: value for key, value in line.items() if key not in left_out}))
PYTHON
}

distance() { # of every two models of the step attention
    local code=0
    [ -e "$out/distance" ] && return
    $FARSPAN lab distance "$out"/attention/models/* --task scan --lengths 1:48 \
        --windows "${WINDOWS:-480}" -o "$out/distance" > "$out/logs/distance.txt" 2>&1 || code=$?
    say "distance: exit code $code"
    return "$code"
}

for step in $STEPS; do
    say "$step"
    for task in ${TASKS:-all}; do
        if [ "$task" = all ]; then train "$step"; else train "$step" "tasks=[\"$task\"]"; fi
    done
    if compgen -G "$out/$step/cells/*.json" > /dev/null; then report "$step"; fi
    if [ "$step" = attention ] && [ "$stopped" = 0 ]; then distance; fi
done
exit "$stopped"
