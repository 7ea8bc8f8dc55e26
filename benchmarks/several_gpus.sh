#!/usr/bin/env bash
# What a machine with several GPUs has to show, most important first:  RANKS=2 benchmarks/several_gpus.sh [OUT]
# OUT: folder of the result files (benchmarks/results/<machine> by default); logs go to OUT/logs or build/logs.
# About 6 minutes on two H200.  All jobs compile at once, then they measure one after the other; rows are saved as they
# come, so a run that is cut off keeps what it had.  NVLink multicast stays off.
cd "$(dirname "$0")/.."
ranks=${RANKS:-$(nvidia-smi -L | wc -l)} out=${1:+--out $1} logs=${1:-build}/logs turn=$(mktemp -d) port=29500
mkdir -p "$logs"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((ranks - 1)))}

# run NAME LIMIT SCRIPT OPTIONS..: on all ranks; then it is the next one's turn
run() {
    local name=$1 limit=$2
    shift 2
    timeout -k 5 "$limit" python3 -m torch.distributed.run --nproc-per-node="$ranks" --master-port="$port" \
        --no-python bash benchmarks/rank.sh "$@" $out > "$logs/$name.txt" 2>&1
    echo "--- $name: exit code $?, $SECONDS s"
    touch "$turn/$name"
}

# measured NAME AFTER LIMIT OPTIONS..: benchmarks/schedule_step.py, which compiles now and measures after AFTER
measured() {
    local name=$1 after=$2 limit=$3
    shift 3
    port=$((port + 1))
    run "$name" "$limit" benchmarks/schedule_step.py --plan-ranks "" --after "$turn/$after" "$@" &
}

# gradients of unequal counts, memory of the two modes, a rank that dies: no timings, beside the compilation
(
    port=29600
    run gradients 150 benchmarks/schedule_grads.py --batches 2
    touch "$turn/first"
) &
(
    timeout 150 python3 benchmarks/schedule_drill.py --timeout 25 $out > "$logs/drill.txt" 2>&1
    echo "--- drill: exit code $?, $SECONDS s"
) &
# data C at tau 1.3: the policies against each other, predicted beside measured
measured policies first 330 --budget 35 --steps 60 --replay 20
# the same without the fused kernels
measured unfused policies 400 --system inductor --budget 20 --steps 20 --replay 8
# data A at its 97,200 tokens, blocks recomputed; tau 1.3 and 2
long="--cap 97200 --checkpoint --layers 2 --shapes 6 --speed-calls 3"
measured long unfused 500 $long --budget 25 --steps 12 --replay 8
measured long_tau_2 long 600 $long --budget 25 --steps 8 --replay 6 --tau 2
wait
rm -r "$turn"
