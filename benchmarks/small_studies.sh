#!/usr/bin/env bash
# The studies of 29M models in docs/results/ (extending.md, searches.md, swan.md), on one GPU.
#
#     benchmarks/small_studies.sh path/to/data OUT
#
# path/to/data has the corpora of docs/corpora.md. Every step writes OUT/STEP/results.json, whose
# cells are lines for docs/records. JOBS processes share the cells of a step. Rerun to resume:
# finished models and cells are not repeated.
#
# PEERS are the rows of the step peers, as PEERS='"none", "yarn"'; the default is all below.
# STEPS chooses steps: train-nope train-rope extend-nope extend-rope extend variants kept swan long
# sharpened peers train-again extend-again small-swan. extend-nope and extend-rope are the two halves
# of extend, which writes the results of both. Calls with other steps and the same OUT can share a
# GPU.
# For a trial on a CPU: NOPE=nope-twin ROPE=rope-twin STEPS="extend swan" and
# SETTINGS="report_windows=1 passkeys=1 extension.choose_windows=1 …".
set -euo pipefail
data=$1 out=$(realpath -m "$2")
all="train-nope train-rope extend variants kept swan long sharpened peers train-again"
all="$all extend-again small-swan"
STEPS=${STEPS:-$all} JOBS=${JOBS:-1} NOPE=${NOPE:-small-nope} ROPE=${ROPE:-small-rope}
SETTINGS=${SETTINGS:-} FARSPAN=${FARSPAN:-farspan}
mkdir -p "$out/logs"

# The text of distillation, with passkey documents as in that of pretraining.
cat > "$out/books-passkeys.toml" <<TOML
passkey = 0.05
[sources.books]
files = "books_train_a.jsonl.xz"
weight = 1.0
TOML

say() { echo "$(date +%T) $*" | tee -a "$out/logs/times.txt"; }

# study STEP RECIPE RUNS KEY=VALUE…: in JOBS processes that share the cells
study() {
    local step=$1 recipe=$2 runs=$3
    shift 3
    local pids=() failed=0
    for job in $(seq "$JOBS"); do
        # shellcheck disable=SC2086
        $FARSPAN reproduce "$recipe" "folder=$data" "runs=$runs" "$@" $SETTINGS \
            -o "$out/$step" > "$out/logs/$step-$job.txt" 2>&1 &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || failed=$?; done
    say "$step ended: exit code $failed"
    return "$failed"
}

train() { # NAME SEED RUNS
    [ -e "$3/$1/model" ] && return
    $FARSPAN pretrain "$1" "seed=$2" "data.folder=$data" -o "$3/$1" > "$out/logs/$1-$2.txt" 2>&1
    say "$1, seed $2, is trained"
}

swan_peers=${PEERS:-'"none", "swan", "swan:swan.long=0.25", "swan:swan.tokens=7536640",
    "yarn:tune=fair,tuning.steps=115,tuning.batch=8,tuning.micro_batch=2",
    "drope:tuning.steps=460,tuning.batch=128,tuning.micro_batch=64,tuning.lr=0.001",
    "continue:tuning.steps=460,tuning.batch=128,tuning.micro_batch=64,tuning.length=512", "yarn"'}
nope='"none", "uniform", "headscale", "headlog", "piecewise", "logn",
    "headscale:search.constraint=false", "headscale:search.init=1"'
rope='"none", "uniform", "ntk", "dynamic-ntk", "yarn", "pi:tune=fair", "yarn:tune=fair"'
nope="$NOPE=[${nope//$'\n'/}]" rope="$ROPE=[${rope//$'\n'/}]"
own=search.steps=0,search.quick=true,search.lr=[0.2],search.passkeys=0 # to a plateau
short=search.steps=50,search.warmup=5
variants="\"headscale:$own\", \"headlog:$own\", \"headlog:$own,search.batch=8\",
    \"headlog:$own,search.batch=8,search.repeats=0\", \"headlog:$short\",
    \"headlog:$short,search.repeats=0.5\", \"headlog:$short,search.repeats=1\",
    \"headscale:$short,search.repeats=1\", \"headlog:search.repeats=1\""

kept=search.steps=100,search.warmup=10,search.passkeys=0.25,search.answers=0.3,search.tail=1.0

for step in $STEPS; do
    say "$step"
    case $step in
        train-nope) train "$NOPE" 0 "$out/runs" ;;
        train-rope) train "$ROPE" 0 "$out/runs" ;;
        extend-nope) study extend extend-small "$out/runs" "methods={$nope}" passkeys=10 \
            "grids=[\"$NOPE\"]" ;;
        extend-rope) study extend extend-small "$out/runs" "methods={$rope}" passkeys=10 \
            "grids=[]" ;;
        extend) study extend extend-small "$out/runs" "methods={$nope, $rope}" passkeys=10 \
            "grids=[\"$NOPE\"]" ;;
        variants) study variants extend-small "$out/runs" "grids=[]" passkeys=10 "factors=[4, 8]" \
            "seeds=[0]" "methods={$NOPE=[${variants//$'\n'/}]}" ;;
        kept) study kept extend-small "$out/runs" "grids=[]" passkeys=20 "factors=[4, 8]" \
            "methods={$NOPE=[\"headscale:$kept\", \"headlog:$kept\"]}" ;;
        swan) study swan swan "$out/runs" "search=$out/books-passkeys.toml" "seeds=[0, 1, 2]" \
            report_windows=120 "methods={$ROPE=[\"none\", \"swan\"]}" ;;
        long) study long swan "$out/runs" "search=$out/books-passkeys.toml" "seeds=[0, 1, 2]" \
            report_windows=120 "methods={$ROPE=[\"none\", \"swan:swan.long=0.25\"]}" ;;
        sharpened) study sharpened swan "$out/runs" "search=$out/books-passkeys.toml" \
            "seeds=[0, 1, 2]" report_windows=120 \
            "methods={$ROPE=[\"swan+headlog:search.answers=0.125\"]}" ;;
        peers) study peers swan "$out/runs" "search=$out/books-passkeys.toml" \
            report_windows=120 "methods={$ROPE=[${swan_peers//$'\n'/}]}" ;;
        train-again) train "$NOPE" 1 "$out/runs-1" ;;
        extend-again) study extend-again extend-small "$out/runs-1" "methods={$nope}" "seeds=[0]" \
            passkeys=10 "grids=[]" ;;
        small-swan) study small-swan swan "$out/runs" report_windows=120 \
            'methods={small-swan=["none"]}' ;;
        *) say "unknown step $step" && exit 2 ;;
    esac
done
