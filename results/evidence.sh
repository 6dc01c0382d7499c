#!/usr/bin/env bash
# The real-evidence runs of the studies, part by part, each resumable: `results/evidence.sh maps tagging`, or all parts.
# BITFIT_DATA is the data folder; E5 and L3 are folders of e5-small and paraphrase-MiniLM-L3. Sizes are what two cores
# do in a few hours; a larger run has other trials and adds to these.
set -euo pipefail
here=$(dirname "$0")
mini=all-MiniLM-L6-v2
run() { bitfit study run "$@" --results "$here" --threads 1; }
# Two rates each, on TREC three: the best is chosen on the first seed.
full=(--method Full --lr 5e-5,1e-4)
few=(--lr 2e-3,4e-3)
three=(--lr 1e-3,2e-3,4e-3)
table3=(--method BitFit --method "b_m2, b_q" --method b_m2 --method b_q --method Frozen --method "rand 100k")
figure7=(--method BitFit --method "b_m2, b_q" --method Frozen --method "Rand uniform" --method "Rand row/col"
  --method g_LN1 --method g_LN2 --method "g_LN1, g_LN2" --method "g_LN1, g_LN2, BitFit"
  --method "g_LN1, g_LN2, b_m2, b_q" --method "b_LN1, b_LN2" --method "no b_m2, b_q" --method randbias)
core7=(--method BitFit --method "b_m2, b_q" --method Frozen --method "Rand uniform" --method "g_LN1, g_LN2"
  --method "b_LN1, b_LN2" --method "no b_m2, b_q")
six=(--method BitFit --method "b_m2, b_q" --method Frozen --method "Rand uniform" --method "b_LN1, b_LN2")
short=(--train-size 600 --dev-size 400 --epochs 4 --evals-per-epoch 1 --seeds 3)
pairs=(--train-size 300 --dev-size 200 --epochs 3 --evals-per-epoch 1 --seeds 3)

selections() { # all selections of bitfit Table 3 and bitfit-plus Figure 7 on one task
  local size=(--base $mini --tasks "$1" "${@:2}")
  run bitfit-table3 "${size[@]}" "${full[@]}"
  run bitfit-table3 "${size[@]}" "${table3[@]}" "${few[@]}"
  run plus-figure7 "${size[@]}" "${full[@]}"
  run plus-figure7 "${size[@]}" "${figure7[@]}" "${few[@]}"
}
trec() { local few=("${three[@]}") && selections trec "${short[@]}"; }
sst2() { selections sst2 "${short[@]}"; }
less() { local figure7=("${core7[@]}") && selections "$@"; } # those that the claims need
cola() { less cola "${short[@]}"; }
mrpc() { less mrpc "${pairs[@]}"; }
qnli() { less qnli "${pairs[@]}"; }
rte() { less rte "${pairs[@]}"; }
base() { # two more bases: Full, BitFit, b_m2 + b_q, b_LN1 + b_LN2, random, Frozen
  run plus-figure7 --base "$1" --tasks trec "${short[@]}" --method Full --lr 1e-4
  run plus-figure7 --base "$1" --tasks trec "${short[@]}" "${six[@]}" "${three[@]}"
}
l3() { base "$L3"; }
e5() { base "$E5"; }
lowdata() {
  local size=(--base $mini --tasks "$1" --train-size "$2" --dev-size 400 --epochs 5 --evals-per-epoch 1 --seeds 3)
  run freeze-low-data "${size[@]}" --method Full --lr 1e-4
  run freeze-low-data "${size[@]}" --method BitFit --method LayerNorm --lr "$3"
}
low-sst2() { lowdata sst2 1000 1e-3; }
low-qnli() { lowdata qnli 500 4e-3; }
initbias() { run freeze-initbias --base $mini --tasks sst2,rte "${pairs[@]}" --method BitFit --method "InitBias+BitFit" --lr 1e-3; }
reinit() { run freeze-reinit --base $mini --tasks sst2,cola --train-size 300 --dev-size 300 --epochs 3 --evals-per-epoch 1 --seeds 1; }
maps() { run bitfit-maps --base $mini --train-size 300 --dev-size 200 --epochs 4 --evals-per-epoch 1 --seeds 2 --lr 1e-3; }
tagging() {
  local size=(--base $mini --tasks ud-pos --train-size 600 --dev-size 300 --epochs 2 --evals-per-epoch 1 --seeds 3)
  run bitfit-tagging "${size[@]}" --method Full --lr 1e-4
  run bitfit-tagging "${size[@]}" --method BitFit --lr 4e-3
}
squad() {
  local size=(--base $mini --train-size 1000 --dev-size 200 --max-length 256 --epochs 2 --evals-per-epoch 1 --seeds 1)
  run bitfit-squad "${size[@]}" --method Full --lr 1e-4
  run bitfit-squad "${size[@]}" --method BitFit --lr 4e-3
}
imdb=(--train-size 300 --dev-size 300 --max-length 96)
grid() { run tiny-imdb --base "$L3" "${imdb[@]}" --epochs 2 --batch 8,32; }
size() {
  for base in "$L3" $mini "$E5"; do
    run tiny-size --base "$base" "${imdb[@]}" --epochs 3 --seeds 2 --method Full --lr 1e-4
    run tiny-size --base "$base" "${imdb[@]}" --epochs 3 --seeds 2 --method BitFit --method "BitFit, head bias" --lr 1e-3
  done
}

all=(trec sst2 cola mrpc qnli rte low-sst2 low-qnli initbias reinit maps tagging squad)
[ -z "${L3:-}" ] || all+=(l3 grid)
[ -z "${E5:-}" ] || all+=(e5)
[ -z "${L3:-}" ] || [ -z "${E5:-}" ] || all+=(size)
[ $# -gt 0 ] || set -- "${all[@]}"
for part in "$@"; do "$part"; done
