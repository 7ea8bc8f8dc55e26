#!/usr/bin/env bash
# What a machine with several GPUs has to show, most important first:  RANKS=2 benchmarks/several_gpus.sh [OUT] [JOB ..]
# OUT: folder of the result files (benchmarks/results/<machine> by default); logs go to OUT/logs or build/logs.
# JOB: some of gradients, drill, policies, unfused, long, long_tau_2 (all by default), in the order in which they measure.
# OPTIONS: more options of schedule_step.py, for every job of it; the last of each counts: OPTIONS="--tau 1.3 --steps 50".
# TINY=1: a rehearsal on CPUs over gloo, tiny sizes, nothing compiled for long:  TINY=1 RANKS=2 benchmarks/several_gpus.sh OUT
# About 6 minutes on two H200.  All jobs compile at once, then they measure one after the other; rows are saved as they
# come, so a run that is cut off keeps what it had.  NVLink multicast stays off.
cd "$(dirname "$0")/.."
ranks=${RANKS:-$(nvidia-smi -L | wc -l)} out=${1:+--out $1} logs=${1:-build}/logs turn=$(mktemp -d) port=29500 before=start
patience=${TINY:+8} patience=${patience:-1}
jobs=${*:2}
jobs=${jobs:-gradients drill policies unfused long long_tau_2}
rows=${1:-benchmarks/results/h200x$ranks}/schedule.json
mkdir -p "$logs"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((ranks - 1)))}
touch "$turn/start"
if [ -n "$TINY" ]; then
    tiny_step="--machine tiny --layers 1 --width 128 --text-dim 32 --shrink 6 --budget 60 --shapes 3 --sizes 2 --speed-calls 3"
    tiny_step+=" --tau 1.3 --steps 3 --replay 2 --workers 1 --after-seconds 3600" system="--system aot_eager" unfused=eager
    tiny_grads="--machine tiny --quick --small 64 --text-dim 16 --system rewritten" tiny_drill="--machine tiny --timeout 200"
fi

# all_ranks NAME SECONDS SCRIPT OPTIONS..
all_ranks() {
    timeout -k 5 $(($2 * patience)) python3 -m torch.distributed.run --nproc-per-node="$ranks" --master-port="$port" \
        --no-python bash benchmarks/rank.sh "${@:3}" $out > "$logs/$1.txt" 2>&1
    echo "--- $1: exit code $?, $SECONDS s"
}

# measured NAME SECONDS OPTIONS..: compile now, measure when everything is compiled and it is this one's turn
measured() {
    local job after=$turn/$before
    for job in $jobs; do [[ ,policies,unfused,long,long_tau_2, == *,$job,* ]] && after+=,$turn/$job.compiled; done
    port=$((port + 1))
    (
        all_ranks "$1" "$2" benchmarks/schedule_step.py --plan-ranks "" --compiled "$turn/$1.compiled" --after "$after" \
            $system "${@:3}" $tiny_step $OPTIONS
        touch "$turn/$1" "$turn/$1.compiled"
    ) &
    before=$1
}

for job in $jobs; do
    case $job in
    gradients) # unequal counts of microbatches: graphopt's graph as it is, and through Inductor; memory of both modes
        (
            (
                port=29800
                all_ranks gradients_rewritten 150 benchmarks/schedule_grads.py --checks grads --system rewritten \
                    $tiny_grads
                all_ranks memory 60 benchmarks/schedule_grads.py --checks memory $tiny_grads
            ) &
            for precision in fp32 bf16; do
                port=$((port + 100))
                all_ranks "gradients_$precision" 170 benchmarks/schedule_grads.py --checks grads --batches 2 \
                    --precisions $precision $tiny_grads &
            done
            wait
            while [[ $jobs == *drill* && ! -e $turn/drill ]]; do sleep 0.2; done
            touch "$turn/gradients"
        ) &
        before=gradients ;;
    drill) # a rank dies; no timing, so beside the others' compilation
        (
            timeout -k 5 $((110 * patience)) python3 benchmarks/schedule_drill.py --timeout 25 $tiny_drill $out > "$logs/drill.txt" 2>&1
            echo "--- drill: exit code $?, $SECONDS s"
            touch "$turn/drill"
        ) & ;;
    policies) # data C: the policies against each other, predicted beside measured, with the GPUs' measured speeds
        measured policies 400 --budget 30 --tau 1.3,2 --steps 50,20 --replay 12 --speeds ;;
    unfused) # the same plans without the fused kernels
        measured unfused 500 --system ${unfused:-inductor} --steps 16 --replay 6 --plan-with "$rows" ;;
    long | long_tau_2) # data A at its 97,200 tokens, blocks recomputed; tau 2 with the fit of tau 1.3
        more="--budget 22 --sizes 8 --speed-calls 3 --steps 10 --replay 4"
        [ $job = long ] || more="--tau 2 --plan-with $rows --steps 7 --replay 3"
        measured $job 600 --cap 97200 --checkpoint --layers 2 --shapes 6 $more ;;
    *) echo "unknown job $job" >&2 ;;
    esac
done
wait
rm -r "$turn"
