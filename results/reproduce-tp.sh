#!/usr/bin/env bash
# First all-reduce waits on N GPUs of one host, in one command:
#   results/reproduce-tp.sh FOLDER N
# Makes FOLDER/waits (1, 2, 4 ... N ranks; 500 and 2,876 graph nodes; four arms), FOLDER/inject (dose-response with every
# rank delayed in turn), and puts their wait.csv, predict.csv, inject.csv and plots into FOLDER itself.
# ATTN_GRAPH names the command (default: attn-graph); STEPS the timed steps per arm (default: 600).
set -euo pipefail
out=${1:?folder for the results} ranks=${2:?how many GPUs}
AG=${ATTN_GRAPH:-attn-graph} STEPS=${STEPS:-600}
case="--backend trtllm_mha --mode decode --swa --bs 64 --context 8192 --max-context 131072"
arms="--arm aten-eager,fused-eager,fused-glue,fused-graph"

phase() { local from=$SECONDS code=0; "${@:2}" || code=$?; echo "== $1: $((SECONDS - from)) s, exit $code"; return $code; }

counts=1
for ((n = 2; n < ranks; n *= 2)); do counts+=,$n; done
counts+=,$ranks

mkdir -p "$out"
phase waits $AG bench $case $arms --tp "$counts" --graph-nodes 500,2876 --steps "$STEPS" \
    --predict-ranks 2..512 --out "$out/waits"
phase inject $AG bench $case $arms --tp "$ranks" --graph-nodes 500 --steps "$STEPS" \
    --inject each:50,100,200,400 --out "$out/inject"
mkdir -p "$out/plots"
cp "$out"/waits/{wait,predict}.csv "$out"/inject/inject.csv "$out"
cp "$out"/waits/plots/first_wait*.* "$out"/inject/plots/dose_response.* "$out/plots"
