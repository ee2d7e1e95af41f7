#!/bin/bash
# Injects faults into the running program, one after another, as a user would meet them.
#
#   run.sh CLONE [NUMBER ...]     CLONE: a checkout after `make setup`; NUMBERs: only these (1 to 15, a, b, c)
#
# Works in copies under a temporary folder (FAULTS_WORK), never in CLONE. As root it mounts a tmpfs of a few hundred
# kilobytes; otherwise it does so in a user namespace. Prints each command, its exit status, last lines and seconds, and
# PASS or FAIL by an explicit check; a table of all checks comes at the end, and the status is 1 if one failed.
set -u
{ # so that bash reads all of it before it begins
CLONE=$(cd "${1:?usage: run.sh CLONE [NUMBER ...]}" && pwd); shift
CHOSEN=${*:-1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 a b c}
HERE=$(cd "$(dirname "$0")" && pwd)
export W=${FAULTS_WORK:-$(mktemp -d /tmp/faults.XXXXXX)}
mkdir -p "$W/logs"; TABLE=$W/table.txt; : > "$TABLE"
export PATH="$CLONE/.venv/bin:$PATH" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE=
export DPTUNE_PLACES=$W/places PREFECT_SERVER_ANALYTICS_ENABLED=false DVC_NO_ANALYTICS=true MLFLOW_DISABLE_TELEMETRY=true
unset DPTUNE_UCI_PATH MLFLOW_TRACKING_URI PREFECT_API_URL PYTHONPATH 2>/dev/null
START=$(date +%s); COUNT=0; RC=0; LOG=/dev/null; SECS=0; NUMBER=0

h() { python "$HERE/h.py" "$@"; }
wants() { case " $CHOSEN " in *" $1 "*) return 0;; *) return 1;; esac; }
title() { NUMBER=$1; shift; printf '\n=== %s. %s   [%s s since start]\n' "$NUMBER" "$*" "$(($(date +%s) - START))"; }

show() { # what was run last
  printf '$ %s\n' "$1"
  tail -n "${LINES_SHOWN:-2}" "$LOG" | cut -c1-330 | sed 's/^/    | /'
  printf '    status %s, %s s\n' "$RC" "$SECS"
}
run() { # run COMMAND...: its status in RC, its output in LOG
  COUNT=$((COUNT + 1)); LOG=$W/logs/$NUMBER-$COUNT.log
  local from; from=$(date +%s%N)
  timeout -k 5 "${LIMIT:-1500}" "$@" > "$LOG" 2>&1; RC=$?
  SECS=$(( ($(date +%s%N) - from) / 100000000 )); SECS=$((SECS / 10)).$((SECS % 10))
  show "$*"
}
start() { # start COMMAND...: in the background; its process id in PID, its output in BACK
  COUNT=$((COUNT + 1)); BACK=$W/logs/$NUMBER-$COUNT.log; "$@" > "$BACK" 2>&1 & PID=$!
  printf '$ %s &\n' "$*"
}
ended() { # ended PID COMMAND-TEXT LOG: wait for what was started
  wait "$1"; RC=$?; LOG=$3; SECS=-; show "$2"
}
check() { # check WHAT TEST...: PASS if the test succeeds
  local what=$1; shift
  if "$@" > /dev/null 2>&1; then local said=PASS; else local said=FAIL; fi
  printf '  %s  %s\n' "$said" "$what"; printf '%-3s %s  %s\n' "$NUMBER" "$said" "$what" >> "$TABLE"
}
has() { grep -qE -- "$1" "$LOG"; }
last() { tail -n 1 "$LOG" | grep -qE -- "$1"; }
clean() { ! grep -q "Traceback (most recent call last)" "$LOG"; }
refused() { # refused REGEX: status 2, no traceback, and the error with its fix as the last line
  [ "$RC" = 2 ] && clean && tail -n 1 "$LOG" | grep -qE -- "^error: .*($1).*Fix: "
}
eq() { [ "$1" = "$2" ]; }
copy() { rm -rf "$W/$2"; cp -a "$W/$1" "$W/$2"; cd "$W/$2" || exit 1; export PREFECT_HOME=$PWD/data/prefect; }
merge_params() { printf '%s\n' "$1" > "$W/over.yaml"; python "$HERE/merge.py" "$W/over.yaml" > /dev/null || exit 1; }
flow() { run python -m flows.experiment; }

# ---------------------------------------------------------------- a small pipeline, built by the program itself
cat > "$W/fast.yaml" <<'Y'
data: {synthetic: {encounters: 200, seed: 7}}
canaries: {extraction: 4, audit: 20}
pretrain: {encounters: 100, validation_encounters: 20, vocabulary: 512, layers: 1, width: 16, heads: 1, max_length: 400, epochs: 1}
lora: {rank: 2}
training: {expected_batch_size: 16, epochs: 4, max_length: 64, warmup_steps: 2, physical_batch_size: 16, checkpoint_every: 4, evaluate_every: 4, evaluate_records: 16}
mechanisms: {static: {max_grad_norm: 1.0}}
experiment: {name: faults, mechanisms: [static], epsilons: [2], devices: ["cpu"], cells_per_device: 1, cells_together: 1, retries: 0}
audit: {generations: 100, records: 20, step_trials: 500}
prediction: {models: [2], tuning: {epochs: 1, batch_size: 8, learning_rate: 0.005, seed: 0}, epsilons: [8], tokens: [64], records: 2, serve: {epsilon: 8, tokens: 64, models: 2, public_weight: 0.2, unit: record}}
Y
NUMBER=0
if [ ! -e "$W/base/data/canaries/train.parquet" ]; then
  title 0 "the pipeline that all faults are injected into: $CLONE at $(git -C "$CLONE" log -1 --format=%h)"
  rm -rf "$W/base"; git clone -q "$CLONE" "$W/base"; cd "$W/base" || exit 1
  run python "$HERE/merge.py" "$W/fast.yaml"
  run dvc repro --quiet $(sed -n 's/^  \(canaries\|pretrain\|validation\):$/\1/p' dvc.yaml)  # whatever the experiment reads
  check "a small pipeline is built up to its public model" eq "$RC" 0
fi

# ---------------------------------------------------------------- 1
if wants 1; then title 1 "MLflow's SQLite locked in mid-run"
  copy base f1; merge_params 'training: {epochs: 20}'
  start python -m flows.experiment; FLOW=$PID; FLOWLOG=$BACK
  start python "$HERE/h.py" lock_when 20 "$FLOW"; LOCK=$PID; LOCKLOG=$BACK
  ended "$FLOW" "python -m flows.experiment   (its MLflow locked from release 20 on)" "$FLOWLOG"
  check "the flow ends with status 0 although the database is locked" eq "$RC" 0
  check "no traceback, and a warning that names variable and fix" eval 'clean && has "MLFLOW_TRACKING_URI: MLflow did not take .*locked.*Fix: free or restore data/mlflow.db"'
  ended "$LOCK" "(the lock)" "$LOCKLOG"; check "the lock was held to the end of the flow" has unlocked
  run python "$HERE/h.py" lost; BEFORE=$(cat "$LOG")
  check "no paid step is lost: 220 of 220" has 'charged=220 steps=220 planned=220 lost=0 complete=True'
  flow; check "the next run ends too" eq "$RC" 0
  run python "$HERE/h.py" mlflow steps; check "and sends the metrics of every step" last '^220$'
  run python "$HERE/h.py" mlflow status; check "both runs of MLflow have ended well" eval '! has "RUNNING|FAILED" && has "child .* FINISHED"'
  run python "$HERE/h.py" lost; check "and charges nothing more" eval 'has "^charged=220" && eq "$(cat "$LOG")" "$BEFORE"'
fi

# ---------------------------------------------------------------- 2
if wants 2; then title 2 "a full disk while checkpointing"
  copy base f2
  if [ "$(id -u)" = 0 ] && mkdir -p data/runs && mount -t tmpfs -o size=400k,mode=700 faults data/runs 2> /dev/null; then
    start python -m flows.experiment; FLOW=$PID; FLOWLOG=$BACK
    start python "$HERE/h.py" fill_when 10 data/runs 4096; FILL=$PID; FILLLOG=$BACK
    ended "$FILL" "(the filler)" "$FILLLOG"
    ended "$FLOW" "python -m flows.experiment   (its disk full from release 10 on)" "$FLOWLOG"
    check "status 2, and the last line names the file and says to free space" refused 'data/runs/'
    run python "$HERE/h.py" charged; PAID=$(cat "$LOG")
    flow; check "run again on the full disk: status 2 with the file's name" refused 'data/runs/'
    run python "$HERE/h.py" charged; check "and not one release more is charged" eval 'last "^[1-9]" && eq "$(cat "$LOG")" "$PAID"'
    rm -f data/runs/filler
    flow; check "after space is freed the flow ends" eq "$RC" 0
    run python "$HERE/h.py" lost; check "every planned release was charged once; lost: at most those since the last checkpoint (4)" eval 'has "charged=44 .*planned=44 lost=[0-4] complete=True"'
    umount "$W/f2/data/runs"
  else
    check "needs root or a mount namespace for its tmpfs" false
  fi
fi

# ---------------------------------------------------------------- 3
if wants 3; then title 3 "two flows at once: two checkouts, one data folder, one cell per device"
  copy base f3; merge_params 'experiment: {mechanisms: [static, nonprivate]}'
  git clone -q "$CLONE" "$W/f3b"; rm -rf "$W/f3b/data"; ln -s "$W/f3/data" "$W/f3b/data"; cp params.yaml "$W/f3b/params.yaml"
  start python -m flows.experiment; ONE=$PID; ONELOG=$BACK
  cd "$W/f3b" || exit 1; start python -m flows.experiment; TWO=$PID; TWOLOG=$BACK; cd "$W/f3" || exit 1
  start python "$HERE/h.py" watch "$ONE,$TWO" tasks.experiment.finetune; WATCH=$PID; WATCHLOG=$BACK
  ended "$ONE" "python -m flows.experiment   (the first)" "$ONELOG"; check "the first flow ends with status 0" eval '[ "$RC" = 0 ] && clean'
  ended "$TWO" "python -m flows.experiment   (the second)" "$TWOLOG"; check "the second flow ends with status 0" eval '[ "$RC" = 0 ] && clean'
  ended "$WATCH" "(processes of cells, looked at every 20 ms)" "$WATCHLOG"; check "never two cells at once" has '^most=1 '
  run python "$HERE/h.py" mlflow status
  check "MLflow: one parent, two children, all FINISHED; none marked as failed" eval '[ "$(awk "{print \$1, \$NF}" "$LOG" | sort | uniq -c | tr -s " " | tr "\n" ";")" = " 2 child FINISHED; 1 parent FINISHED;" ]'
  run python "$HERE/h.py" lost static; check "no release was paid twice" has 'charged=44 steps=44 planned=44 lost=0 complete=True'
fi

# ---------------------------------------------------------------- 4 (and the damaged checkpoints of 6 and 7 need its remains)
if wants 4 || wants 6 || wants 7; then title 4 "kill -9 of a flow in the middle of a cell"
  copy base f4; merge_params 'training: {epochs: 20, checkpoint_every: 8}'
  start python -m flows.experiment; FLOW=$PID; FLOWLOG=$BACK
  h wait_releases 30; THERE=$(h servers); kill -9 "$FLOW"; wait "$FLOW" 2> /dev/null
  run python "$HERE/h.py" wait_no_server 30; check "a server of Prefect and a cell were there ($THERE processes), and are gone a little later" eval '[ "$THERE" -ge 2 ] && [ "$RC" = 0 ]'
  PAID=$(h charged); echo "    killed after $PAID releases"; cp -a "$W/f4" "$W/killed"
  if wants 4; then
    flow; check "run again: ends with status 0" eval '[ "$RC" = 0 ] && clean'
    run python "$HERE/h.py" lost; check "no paid step lost beyond a checkpoint (8)" eval 'has "charged=220 .*planned=220 lost=[0-8] complete=True"'
    run dptune verify data/runs/small.static*/ledger.jsonl; check "its ledger verifies" eq "$RC" 0
    run python "$HERE/h.py" mlflow status; check "MLflow has one run of the cell, and it is FINISHED" eval 'has "child .* FINISHED" && ! has "RUNNING|FAILED"'
  fi
fi

# ---------------------------------------------------------------- 5
if wants 5; then title 5 "tables that are cut, zips that are cut or bombs"
  copy base f5
  h cut_at_line data/raw/diabetic_data.csv 40
  run python -m tasks.corpus.verbalize; check "data/raw's table cut at a line end: the stage verbalize refuses it" refused 'data/raw/.*(rows|SHA-256|manifest|source.json)'
  copy base f5b; merge_params 'data: {source: uci}'; h make_zips data/raw "$W"
  run env DPTUNE_UCI_PATH="$W/cut.zip" python -m tasks.corpus.acquire; check "a truncated zip: said so (DPTUNE_UCI_PATH)" refused 'cut.zip.*not a readable zip.*cut off'
  merge_params "data: {source: uci, path: $W/cut.zip}"
  run python -m tasks.corpus.acquire; check "the same by data.path" refused 'cut.zip.*not a readable zip.*cut off'
  run python "$HERE/h.py" measured env DPTUNE_UCI_PATH="$W/bomb.zip" python -m tasks.corpus.acquire
  check "a nested bomb (20 zips of 1 GB): refused" eval '[ "$RC" = 2 ] && clean && has "^error: .*bomb.zip.*beyond what is allowed.*Fix: "'
  check "within 15 s and 400 MB (before: 43 s, 950 MB)" eval '[ "${SECS%.*}" -lt 15 ] && [ "$(sed -n "s/^peak_MB=//p" "$LOG")" -lt 400 ]'
  mkdir -p "$W/cut"; cp data/raw/*.csv "$W/cut/"; h cut_at_line "$W/cut/diabetic_data.csv" 40
  run env DPTUNE_UCI_PATH="$W/cut/diabetic_data.csv" python -m tasks.corpus.acquire; check "a CSV cut at a line end: its hash is not the archive's" refused 'wrong diabetic_data.csv: its SHA-256'
  check "nothing half-written is left in data/raw" eval '[ -z "$(ls -A data/raw | grep -v -E "^(diabetic_data.csv|IDs_mapping.csv|source.json|.gitignore)$")" ]'
fi

# ---------------------------------------------------------------- 6
if wants 6; then title 6 "damaged checkpoints"
  for kind in step99 nan future nomoment shape otherrun cut empty header pickle; do
    rm -rf "$W/f6"; copy killed f6
    CHECKPOINT=$(ls data/runs/*/checkpoint.safetensors); PAID=$(h charged)
    h damage "$kind" "$CHECKPOINT"
    if [ "$kind" = step99 ]; then flow; else run python -m tasks.experiment.finetune data/runs/small.static*/cell.json; fi
    check "$kind: refused by name, status 2, no traceback, nothing charged" eval 'refused "checkpoint.safetensors" && [ "$(h charged)" = "$PAID" ]'
  done
fi

# ---------------------------------------------------------------- 7
if wants 7; then title 7 "a ledger of format 4, written by the code of its time"
  mkdir -p "$W/old"; git -C "$CLONE" archive 94528af~1 dptune | tar x -C "$W/old"
  rm -rf "$W/f7"; copy killed f7
  rm -f "$W/four.jsonl"
  cd "$W/old" || exit 1; run python -c "
from collections import Counter
from pathlib import Path
from dptune.privacy.ledger import Ledger, RunHeader
from dptune.privacy.release import Release
one = Release(0.0963855421686747, 1.6384793436463476)
header = RunHeader('static', 'gdp_clt', 'certified', 2.0, 1e-5, 'encounter', 166)
with Ledger.create(Path('$W/four.jsonl'), header, Counter({one: 44})) as ledger:
    for _ in range(20): ledger.charge(one)
"; check "the old code wrote it" grep -q '"format":4' "$W/four.jsonl"; cd "$W/f7" || exit 1
  run dptune verify "$W/four.jsonl"; check "dptune verify refuses it, and says that it is undamaged" refused 'format.*4.*'
  FIX1=$(tail -n 1 "$LOG" | sed 's/.*Fix: //')
  cp "$W/four.jsonl" data/runs/small.static*/ledger.jsonl; rm -f data/runs/*/checkpoint.safetensors; SUM=$(sha256sum < "$W/four.jsonl")
  flow; check "as the ledger of a run to go on with: refused" refused 'format.*4.*'
  FIX2=$(tail -n 1 "$LOG" | sed 's/.*Fix: //')
  printf '    fix of verify: %s\n    fix of resume: %s\n' "$FIX1" "$FIX2"
  check "the fixes do not contradict each other (no 'restore', no 'remove')" eval '! printf "%s%s" "$FIX1" "$FIX2" | grep -qiE "restore|remove|delete"'
  check "and the file is untouched" eq "$(sha256sum < data/runs/small.static*/ledger.jsonl)" "$SUM"
fi

# ---------------------------------------------------------------- 8
if wants 8; then title 8 "a diverged cell"
  copy base f8
  cp params.yaml params.kept; python - <<'P'
import pathlib, re
p = pathlib.Path("params.yaml"); s = p.read_text()
p.write_text(re.sub("  learning_rate: .*\n  warmup_steps", "  learning_rate: 1.0e+30\n  warmup_steps", s, count=1))
P
  run python -m flows.experiment; check "learning rate 1e30 in params.yaml: refused before any work" refused 'training.learning_rate'
  cp params.kept params.yaml
  merge_params 'mechanisms: {wild: {like: static, learning_rate: 10}}
lora: {alpha: 1000000, target_modules: [lm_head]}
experiment: {mechanisms: [wild]}'
  flow; check "a cell whose rate times scale is beyond reason: fails and says that it diverged" refused 'small.wild.*diverged'
  check "it has no result, and its ledger stays" eval '[ ! -e data/runs/small.wild*/result.json ] && [ -s data/runs/small.wild*/ledger.jsonl ]'
  merge_params 'lora: {alpha: 16, target_modules: [c_attn]}
experiment: {mechanisms: [static]}'; flow
  run python -m flows.audit; run python -m tasks.report.experiment
  check "a report of the other cells works, and counts what the diverged one has spent" eval '[ "$RC" = 0 ] && grep -q "small.static" data/report/report.html && grep -q "small.wild" data/report/report.html'
fi

# ---------------------------------------------------------------- 9
if wants 9; then title 9 "checkouts under paths with %, ? and a space"
  for name in 'per%20cent' 'que?ry' 'sp ace'; do
    mkdir -p "$W/$name"; cp -a "$W/base" "$W/$name/checkout"
    cd "$W/$name/checkout" || exit 1; export PREFECT_HOME=$PWD/data/prefect
    run dvc repro experiment; check "$name: dvc repro ends with status 0" eval '[ "$RC" = 0 ] && clean && ! has "did not take" && has "small.static.eps2.seed0 completed"'
    run python "$HERE/h.py" mlflow steps; check "$name: its MLflow database is readable and has all 44 steps" last '^44$'
    check "$name: and lies in data, nothing beside the checkout" eval '[ -s data/mlflow.db ] && [ "$(ls -A "$W/$name")" = checkout ]'
  done
fi

# ---------------------------------------------------------------- 10 and 11 share an ensemble
if wants 10 || wants 11; then title 10 "answers: a plan without a protocol, slots, a ledger cut back"
  copy base f10
  flow
  run python -m flows.prediction; check "an ensemble of two shards is tuned" eq "$RC" 0
  ENSEMBLE=$(python -c "import json; print(json.load(open('data/prediction/results.json'))['served'])")
fi
if wants 10; then
  cp -a "$W/f10" "$W/f10b"; cd "$W/f10b" || exit 1
  run python -c "
from tasks.prediction.ensembles import close_plan, plans
from tasks.settings.params import load_settings
(plan,) = plans(load_settings())
close_plan(plan, None, 'research')
print(plan.directory)"
  run dptune generate "The patient" --tokens 2; check "close_plan(plan, None): nobody is served, no budget is made up" refused 'serves nobody: no budget was set'
  check "and no ledger was opened" eval '[ ! -e "$ENSEMBLE/ledger.jsonl" ]'
  rm -rf "$W/f10b"; cp -a "$W/f10" "$W/f10b"; cd "$W/f10b" || exit 1
  python - "$ENSEMBLE" <<'P'
import json, pathlib, sys
file = next(path for path in pathlib.Path(sys.argv[1]).glob("*.json") if "protocol" in json.loads(path.read_text()))
content = json.loads(file.read_text()); content["protocol"]["models"] = 80; file.write_text(json.dumps(content))
P
  run dptune generate "The patient" --tokens 2; check "a protocol for 80 models on 2 slots: refused" refused '2 slots, and its protocol 80'
  check "before the ledger is opened" eval '[ ! -e "$ENSEMBLE/ledger.jsonl" ]'
  rm -rf "$W/f10b"; cp -a "$W/f10" "$W/f10b"; cd "$W/f10b" || exit 1
  run dptune generate "The patient" --tokens 6; check "six tokens are answered" eq "$RC" 0
  cp "$ENSEMBLE/served.json" "$W/served.kept"
  rm "$ENSEMBLE/served.json"; h cut_ledger "$ENSEMBLE/ledger.jsonl" 3
  run dptune generate "The patient" --tokens 2; check "served.json deleted and the ledger cut back by 3: refused" refused 'served.json'
  cp "$W/served.kept" "$ENSEMBLE/served.json"
  run dptune generate "The patient" --tokens 2; check "the note restored, the ledger still cut back: refused" refused 'ledger.jsonl'
fi

# ---------------------------------------------------------------- 11
if wants 11; then title 11 "the service"
  cp -a "$W/f10" "$W/f11"; cd "$W/f11" || exit 1
  PORT=$(python -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
  export DPTUNE_SERVE_TOKEN=0123456789abcdef0123456789abcdef
  start dptune serve --port "$PORT"; SERVE=$PID; SERVELOG=$BACK; URL=http://127.0.0.1:$PORT
  for _ in $(seq 120); do curl -s -o /dev/null "$URL/docs" && break; sleep 0.5; done
  RIGHT="Authorization: Bearer $DPTUNE_SERVE_TOKEN"
  ask() { run curl -s -m 60 -w '\n%{http_code}\n' "$@"; }
  ask "$URL/budget"; check "no token: 401" last '^401$'
  ask -H "Authorization: Bearer wrong" "$URL/budget"; check "a wrong token: 401" last '^401$'
  ask -H "$RIGHT" "$URL/budget"; check "the right one: 200" last '^200$'; LEFT=$(sed -n 's/.*"tokens_left":\([0-9]*\).*/\1/p' "$LOG")
  ask -H "$RIGHT" -H "Host: evil.example.com" "$URL/budget"; check "a foreign Host header: 400" last '^400$'
  python -c "import json; print(json.dumps({'prompt': 'a' * 20_000_000, 'tokens': 1}))" > "$W/20mb.json"
  ask -H "$RIGHT" -H 'Content-Type: application/json' --data-binary "@$W/20mb.json" "$URL/generate"; check "a prompt of 20 MB: 413 within 5 s (before: 65 s)" eval 'last "^413$" && [ "${SECS%.*}" -lt 5 ]'
  ask -H "$RIGHT" -H 'Content-Type: application/json' -d '{"prompt": "\ud800", "tokens": 1}' "$URL/generate"; check "half of a surrogate pair: 422" last '^422$'
  ask -H "$RIGHT" -H 'Content-Type: application/json' -d '{"prompt": "a", "tokens": NaN}' "$URL/generate"; check "NaN for a number: 422" last '^422$'
  ask -H "$RIGHT" -H 'Content-Type: application/json' -d '{"prompt": "a", "tokens": true}' "$URL/generate"; check "true for a number: 422" last '^422$'
  ask -H "$RIGHT" "$URL/budget"; check "none of these spent a token ($LEFT left)" has "\"tokens_left\":$LEFT"
  ask -H "$RIGHT" -H 'Content-Type: application/json' -d '{"prompt": "The patient", "tokens": 2}' "$URL/generate"; check "a proper request: 200" last '^200$'
  kill "$SERVE"; wait "$SERVE" 2> /dev/null; LOG=$SERVELOG; check "no traceback in the service's log" clean
  unset DPTUNE_SERVE_TOKEN
  check "the ledger of answers says the experiment's telemetry (research)" eval 'head -n 1 "$ENSEMBLE/ledger.jsonl" | grep -q "\"telemetry\":\"research\""'
  run dptune generate $'\xff\xfe'; check "an argument that is no UTF-8: refused" refused 'no UTF-8'
  cp -a "$W/f10" "$W/f11b"; cd "$W/f11b" || exit 1; merge_params 'experiment: {telemetry: private}'
  rm -rf data/ensembles data/prediction
  run python -m flows.prediction
  ENSEMBLE=$(python -c "import json; print(json.load(open('data/prediction/results.json'))['served'])"); run dptune generate "The patient" --tokens 1
  check "under telemetry private it says private" eval 'head -n 1 "$ENSEMBLE/ledger.jsonl" | grep -q "\"telemetry\":\"private\""'
fi

# ---------------------------------------------------------------- 12
if wants 12; then title 12 "make paper is the paper"
  copy base f12
  LINES_SHOWN=12 run python "$HERE/paper.py" profiles/paper.yaml published
  check "profiles/paper.yaml: the paper's baselines, intervals, warm-ups, schedule, models, epsilons, published accounting" eq "$RC" 0
  LINES_SHOWN=12 run python "$HERE/paper.py" profiles/paper-certified.yaml certified
  check "profiles/paper-certified.yaml: the same with sound mechanisms and certified accounting" eq "$RC" 0
  LINES_SHOWN=1 run python "$HERE/paper.py" tiny profiles/paper.yaml "$W/over.yaml"; python "$HERE/merge.py" "$W/over.yaml" > /dev/null
  LIMIT=1500 run python -m flows.experiment; check "its eight mechanisms run on the small synthetic model" eval '[ "$RC" = 0 ] && [ "$(ls -d data/runs/*/result.json | wc -l)" = 8 ]'
  LIMIT=1500 run python -m flows.audit; run python -m tasks.report.experiment; check "audit and report end" eq "$RC" 0
  LINES_SHOWN=12 run python "$HERE/paper.py" page; check "the page has the two membership columns and the table of steps, with all eight" eq "$RC" 0
fi

# ---------------------------------------------------------------- 13
if wants 13; then title 13 "numbers and settings beyond reason"
  LINES_SHOWN=1; copy base f13
  explained() { clean && { [ "$RC" = 0 ] || tail -n 1 "$LOG" | grep -qE "^error: .*Fix: "; } && [ "$RC" -le 2 ]; }
  for z in 1e-8 1e-300 1e300; do
    run dptune account static --delta 1e-5 --sample-rate 0.01 --steps 100 --set noise_multiplier=$z; check "account at noise $z: a number or a sentence" explained
    rm -f "$W/z.jsonl"; run python "$HERE/h.py" distinct_ledger "$W/z.jsonl" 5 $z
    if [ -e "$W/z.jsonl" ]; then run dptune verify "$W/z.jsonl"; fi; check "verify at noise $z" explained
    run dptune audit psac --trials 500 --set noise_multiplier=$z; check "audit psac at noise $z" explained
    merge=$(printf 'mechanisms: {static: {max_grad_norm: 1.0, noise_multiplier: %s}}' $z); cp "$W/base/params.yaml" params.yaml
    printf '%s\n' "$merge" > "$W/over.yaml"; run python "$HERE/merge.py" "$W/over.yaml"; check "params.yaml at noise $z" explained
    rm -rf "$W/zrun"; cp -a "$W/killed" "$W/zrun" 2> /dev/null
  done
  run python "$HERE/noise_cells.py"; check "finetune of cells at these three: no traceback" eval '[ "$RC" = 0 ]'
  run dptune account static --delta 1e-5 --sample-rate 0.01 --steps 10 --set noise_multiplier=1 --set noise_multiplier=2
  check "--set given twice: refused" refused 'noise_multiplier.*twice'
  cp "$W/base/params.yaml" params.yaml; printf 'audit: {generations: 1}\n' >> params.yaml
  run python -m flows.experiment; check "a key of params.yaml given twice: refused with its line" refused 'line [0-9]+.*twice'
  python "$HERE/settings.py" "$W/base/params.yaml" "$W/settings"
  for file in "$W"/settings/*.yaml; do
    name=$(basename "$file" .yaml); cp "$file" params.yaml
    run python -m tasks.experiment.checks; check "setting $name: refused, one line with its fix" refused '.'
  done
  unset LINES_SHOWN
fi

# ---------------------------------------------------------------- 14
if wants 14; then title 14 "a ledger of 20,000 distinct releases"
  cd "$W/base" || exit 1; h distinct_ledger "$W/many.jsonl" 20000
  LINES_SHOWN=6 run dptune verify "$W/many.jsonl"; check "verified within 30 s (before: over 90 s): $SECS s" eval '[ "$RC" = 0 ] && [ "${SECS%.*}" -lt 30 ]'
fi

# ---------------------------------------------------------------- 15
if wants 15; then title 15 "models that cannot be trained right"
  LINES_SHOWN=2; mkdir -p "$W/f15"; cd "$W/f15" || exit 1; M=$W/f15/models
  run python "$HERE/models.py" "$W/base/data/models/public" "$M"
  tune() { rm -rf tuned; run dptune tune --data "$M/records.csv" --epsilon 4 --max-length 96 --epochs 0.5 --batch 16 --rank 2 "$@"; }
  uncharged() { ! grep -q '"kind":"release"' tuned/ledger.jsonl 2> /dev/null && ! grep -rq '"kind":"release"' tuned 2> /dev/null; }
  for family in roberta bert electra; do tune --model "$M/$family"; check "$family: refused as an encoder, nothing charged" eval 'refused "encoder" && uncharged'; done
  tune --model "$M/xlnet" --target-modules layer_1,layer_2; check "XLNet (rows that are no tokens): refused" eval 'refused "xlnet.*(not causal|encoder|rows|layer)" && uncharged'
  tune --model "$M/classifier"; check "a classification checkpoint: refused by name" eval 'refused "classif" && uncharged'
  tune --model "$M/opt" --target-modules fc1,fc2; check "OPT's fc1, fc2: supported" eq "$RC" 0
  tune --model "$M/gpt2" --target-modules all-linear; check "all-linear: supported" eq "$RC" 0
  tune --model "$M/gpt2" --target-modules wte; check "embeddings as targets: refused by name" eval 'refused "wte" && uncharged'
  tune --model "$M/four-bit"; check "a checkpoint that says 4-bit: $(tail -n 1 "$LOG" | cut -c1-100)" eval 'clean && { [ "$RC" = 0 ] || { refused "(quanti|4.bit|bitsandbytes)" && uncharged; }; }'
  for kind in adalora alora checkpointing; do
    run python "$HERE/adapters.py" $kind "$M/gpt2" "$M/records.csv"; check "dptune.tune on a model with $kind: $(grep -E "^(error|$kind)" "$LOG" | tail -n 1 | cut -c1-100)..., no charge or supported" eval 'clean && { [ "$RC" = 0 ] || { has "^error: .*Fix: " && has "^charged=0$"; }; }'
  done
  for kind in adalora alora checkpointing unbuilt; do
    run python "$HERE/adapters.py" library $kind "$M/gpt2"; check "train() of the library with $kind: $(grep -E "^(error|$kind)" "$LOG" | tail -n 1 | cut -c1-100)..., no charge or supported" eval 'clean && { [ "$RC" = 0 ] || { has "^error: .*Fix: " && has "^charged=0$"; }; }'
  done
  unset LINES_SHOWN
fi

# ---------------------------------------------------------------- a
if wants a; then title a "dvc repro where no python is on PATH"
  mkdir -p "$W/tools"; for tool in /usr/bin/* /bin/*; do case $(basename "$tool") in python*|pyenv*|dvc) ;; *) ln -sf "$tool" "$W/tools/" 2> /dev/null;; esac; done
  copy base fa; ln -sfn "$CLONE/.venv" .venv
  run env PATH="$W/tools" .venv/bin/dvc repro --force --single-item checks; check ".venv/bin/dvc repro works by itself" eq "$RC" 0
  rm .venv; run env PATH="$W/tools" "$CLONE/.venv/bin/dvc" repro --force --single-item checks
  check "without .venv it says what to do" eval '[ "$RC" != 0 ] && clean && has "^error: no python is on PATH.*Fix: " && ! has "not found"'
fi

# ---------------------------------------------------------------- b
if wants b; then title b "two commands fail at once on one data folder: each says its own cause"
  copy base fb; ln -sfn "$CLONE/.venv" .venv; touch -d 2000-01-01 pyproject.toml constraints.txt  # or make would install again
  sed -i 's/epsilons: \[2\]/epsilons: [-1]/' params.yaml
  git clone -q "$CLONE" "$W/fbb"; rm -rf "$W/fbb/data"; ln -s "$W/fb/data" "$W/fbb/data"
  (cd "$W/fbb" && while :; do python -m tasks.profile nosuch.yaml > /dev/null 2>&1; done) & OTHER=$!
  sleep 3; LINES_SHOWN=3 run make repro; kill "$OTHER"; wait "$OTHER" 2> /dev/null
  check "make repro's last sentence is its own (experiment.epsilons), not the other's (nosuch.yaml)" eval 'grep "^error: " "$LOG" | tail -n 1 | grep -q experiment.epsilons && ! has nosuch'
  check "and no file of it is left" eval '[ ! -e data/error.txt ]'
fi

# ---------------------------------------------------------------- c
if wants c; then title c "Ctrl-C at a terminal"
  copy base fc; merge_params 'training: {epochs: 40}'
  run python "$HERE/h.py" interrupted 30 python -m flows.experiment
  check "status 130 within 10 s, and how far it came" eval 'has "^ended with 130 after [0-9](\.[0-9])? s" && has "stopped at release [0-9]+ of 440; run again to go on"'
  run python "$HERE/h.py" prefect_states; check "Prefect's database has the run as cancelled, and nothing as running" eval 'has "^flow_run CANCELLED" && ! has "RUNNING|PENDING"'
  run python "$HERE/h.py" wait_no_server 15; check "no server and no cell is left" eq "$RC" 0
  flow; check "run again: finished" eq "$RC" 0
fi

# ---------------------------------------------------------------- the table
printf '\n=== all checks, %s s; processor time (shell, then all that it started):\n' "$(($(date +%s) - START))"; times; cat "$TABLE"
printf '%s passed, %s failed; logs in %s\n' "$(grep -c ' PASS ' "$TABLE")" "$(grep -c ' FAIL ' "$TABLE")" "$W/logs"
! grep -q ' FAIL ' "$TABLE"; exit
}
