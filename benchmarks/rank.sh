#!/usr/bin/env bash
# For torchrun --no-python: each rank sees its own GPU only, as device 0, so that compiled graphs of all ranks are one in
# Inductor's caches (a graph names its device).  NCCL still goes over NVLink.
devices=(${CUDA_VISIBLE_DEVICES//,/ })
export CUDA_VISIBLE_DEVICES=${devices[$LOCAL_RANK]:-$LOCAL_RANK} LOCAL_RANK=0
exec python3 "$@"
