#!/usr/bin/env bash
# Makes the runs in this folder anew: reproduce.sh OUT [PEER ...]
# OUT: folder to write to. PEER: folders that hold an sglang release (pip install --no-deps --target PEER sglang==...).
set -uo pipefail
OUT=$1
shift
AG="${ATTN_GRAPH:-attn-graph}"
mkdir -p "$OUT"
$AG env --json > "$OUT/env.json"
$AG bench --bs 1,8,256 --tp 1 --arm aten,fused --out "$OUT/decode-sizes"
$AG bench --bs 64 --tp 1 --out "$OUT/decode"
$AG bench --bs 64 --swa --tp 8 --arm aten-eager,fused --steps 400 --out "$OUT/tp8"
$AG bench --mode all --bs 64 --swa --tp 1 --steps 100 --arm aten-eager,aten-graph,fused --out "$OUT/modes"
$AG bench --backend all --bs 1,8,64,256 --tp 1 --steps 60 --max-context 32768 \
    --arm aten-eager,aten-graph,fused-eager,fused-graph --out "$OUT/backends"
ATTN_GRAPH_TUNED_DIR="$OUT/tuned" $AG tune --out "$OUT/tune.csv" > "$OUT/tune.txt"
ATTN_GRAPH_TUNED_DIR="$OUT/tuned-exhaustive" $AG tune --search exhaustive --bs 64 --held-out \
    --out "$OUT/tune_exhaustive.csv" > "$OUT/tune_held_out.txt"
ATTN_GRAPH_TUNED_DIR="$OUT/tuned-budget" $AG tune --time-budget 60 --out "$OUT/tune_budget.csv" > "$OUT/tune_budget.txt"
$AG tune --against-autotune --backend trtllm_mla --bs 64 --out "$OUT/autotune.csv" > "$OUT/autotune.txt"
$AG verify --backend trtllm_mha --full --out "$OUT/verify.csv"
$AG verify --out "$OUT/verify_all.csv"
peers=()
for peer in "$@"; do peers+=(--peer "$peer"); done
$AG perf "${peers[@]}" --out "$OUT" > "$OUT/floor.txt"
PYTHONPATH="${!#}:${PYTHONPATH:-}" $AG bench --backend trtllm_mha,triton,trtllm_mla --arm sglang,fused --bs 64 --no-swa --tp 1 \
    --steps 60 --no-plots --out "$OUT/peers"  # the last PEER
ncu --target-processes all --nvtx --nvtx-include "attn_graph@prep trtllm_mha decode fused-eager/" --clock-control none \
    --metrics gpu__time_duration.sum \
    $AG bench --bs 8 --no-swa --tp 1 --steps 3 --warmup 1 --graph-nodes 5 --arm fused-eager,aten-eager --no-plots \
    --out "$OUT/under-ncu" > "$OUT/nvtx.txt" 2>&1
rm -rf "$OUT/under-ncu"
for tool in memcheck racecheck initcheck; do  # from a checkout with the test extra
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
        python3 -m pytest -q -m gpu tests/backends/test_each_kernel_once.py > "$OUT/sanitizer_$tool.txt" 2>&1
done
