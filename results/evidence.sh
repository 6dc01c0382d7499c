#!/usr/bin/env bash
# The real-evidence runs of the studies, each resumable; `results/evidence.sh --dry-run` says what is missing and how long.
# BITFIT_DATA is the data folder; E5 and L3 are folders of e5-small and paraphrase-MiniLM-L3. Other options go to every run.
set -euo pipefail
here=$(dirname "$0")
mini=all-MiniLM-L6-v2
run() { bitfit study run "$@" --results "$here" --threads "${THREADS:-1}"; }
small=(--train-size 1000 --dev-size 500 --epochs 5 --evals-per-epoch 2 --seeds 3 "$@")
six=(--method Full --method BitFit --method "b_m2, b_q" --method Frozen)

# All selections of bitfit Table 3 and bitfit-plus Figure 7
run bitfit-table3 --base "$mini" --tasks sst2,mrpc,qnli,trec,rte,cola "${small[@]}"
run plus-figure7 --base "$mini" --tasks sst2,mrpc,qnli,trec,rte,cola "${small[@]}"
# Two more bases: Full, BitFit, b_m2 + b_q, b_LN1 + b_LN2, random, Frozen
for base in "${E5:-}" "${L3:-}"; do
  [ -n "$base" ] || continue
  run plus-figure7 --base "$base" --tasks sst2,mrpc,qnli,trec "${six[@]}" --method "b_LN1, b_LN2" --method "Rand uniform" "${small[@]}"
done
# Low data, InitBias, full re-initialisation, change maps
run freeze-low-data --base "$mini" --tasks sst2,qnli --dev-size 500 --train-size 2000 --epochs 5 --seeds 3 --search first-seed "$@"
run freeze-initbias --base "$mini" --tasks rte,sst2,cola --method BitFit --method "InitBias+BitFit" "${small[@]}"
run freeze-reinit --base "$mini" --tasks cola,sst2 "${small[@]}"
run bitfit-maps --base "$mini" "${small[@]}"
# SQuAD by size, tagging, IMDB's grid with both heads, the gap against model size
run bitfit-squad --base "$mini" --train-size 5000 --dev-size 500 --epochs 2 --seeds 2 "$@"
run bitfit-tagging --base "$mini" --tasks ud-pos --train-size 3000 --dev-size 500 --epochs 2 --seeds 3 "$@"
if [ -n "${L3:-}" ]; then
  run tiny-imdb --base "$L3" --train-size 2000 --dev-size 1000 --max-length 128 "$@"
fi
for base in "${L3:-}" "$mini" "${E5:-}"; do
  [ -n "$base" ] || continue
  run tiny-size --base "$base" --train-size 2000 --dev-size 1000 --max-length 128 "$@"
done
