#!/usr/bin/env bash
# What a machine with several GPUs has to show, most important first:  RANKS=2 benchmarks/several_gpus.sh [OUT]
# OUT: folder of the result files (benchmarks/results/<machine> by default).  About 8 minutes on two H200, of which
# 2 are compilation; NVLink multicast stays off.
cd "$(dirname "$0")/.."
ranks=${RANKS:-$(nvidia-smi -L | wc -l)} out=${1:+--out $1}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((ranks - 1)))}
port=29500
run() {
    port=$((port + 1))
    echo "--- $* ($SECONDS s)"
    timeout -k 5 "$limit" python3 -m torch.distributed.run --nproc-per-node="$ranks" --master-port=$port \
        --no-python bash benchmarks/rank.sh "$@"
}
long="--cap 97200 --checkpoint --layers 2 --shapes 6"

# gradients of unequal counts (graphopt's graph as it is needs no compiler), beside the compilation of what comes next
(limit=120 run benchmarks/schedule_grads.py --checks grads --batches 2 --system rewritten $out) &
limit=200 run benchmarks/schedule_step.py --compile-only
wait
# every policy on data C, predicted beside measured
limit=240 run benchmarks/schedule_step.py --budget 30 --steps 40 --replay 20 --plan-ranks "" $out
# the same gradients through Inductor, fp32 and mixed precision; memory of ZeRO-1 mode against slots
limit=240 run benchmarks/schedule_grads.py --batches 2 $out
# without the fused kernels
limit=240 run benchmarks/schedule_step.py --system inductor --budget 20 --steps 20 --replay 8 --policies step_balanced --plan-ranks "" $out
# data A at its 97,200 tokens, blocks recomputed
limit=300 run benchmarks/schedule_step.py $long --budget 30 --steps 12 --replay 8 --speed-calls 3 --plan-ranks "" $out
