#!/bin/sh
# What only a GPU can show: rows against their twins (which is the evidence), the kernel tests, large offsets, the real model.
# test_gpu.sh PYTHON OUT [verify|tests]: OUT/h200.json (the device's name) is what is committed under rapid_llm/kernels/evidence.
set -eu
python=$1 out=$2 part=${3:-all}
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 # references run on the host, many at once
mkdir -p "$out"
work=$(mktemp -d)
if [ "$part" != tests ]; then
    # Most of the time goes to compilers, so every op has a process and a store of its own; the stores are joined afterwards.
    for op in $("$python" -m rapid_llm kernels list --json | "$python" -c 'import json, sys; print(*sorted({row["op"] for row in json.load(sys.stdin)}))'); do
        RAPID_DATA_DIR="$work/verify/$op" "$python" -m rapid_llm kernels verify --op "$op" >"$work/$op.log" 2>&1 || touch "$work/failed" &
    done
    wait
    cat "$work"/*.log | tee "$out/verify.log"
    "$python" scripts/join_evidence.py "$work/verify" "$out"
fi
if [ "$part" != verify ]; then
    for folder in tests/gpu tests/kernels; do
        "$python" -m pytest -p no:benchmark -n "${WORKERS:-4}" --tb=line -rf "$folder" 2>&1 | tee "$out/$(basename $folder).log" | tail -n "${TAIL:-40}"
        grep -q ' passed' "$out/$(basename $folder).log" && ! grep -qE '[0-9]+ (failed|error)' "$out/$(basename $folder).log" || touch "$work/failed"
    done
fi
[ ! -e "$work/failed" ]
