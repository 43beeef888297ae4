#!/bin/sh
# Fill this card's shipped stores and results: evidence of every row, tiles, latencies, benchmarks, and the page made of them.
# measure_gpu.sh PYTHON OUT: what is to be committed is then in place under rapid_llm/kernels, benchmarks/results and docs.
set -eu
python=$1 out=$2
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
here=rapid_llm/kernels
sh scripts/test_gpu.sh "$python" "$out" verify
cp "$out"/*.json $here/evidence/
"$python" -m benchmarks.kernels.tune_tiles "$out"
cp "$out"/evidence/*.json $here/evidence/
cp "$out"/tuned/*.json $here/tuned/
"$python" -m benchmarks.kernels.check_served # ends the script where a slower row serves some cell
"$python" -m benchmarks.kernels.all
"$python" -m benchmarks.kernels.report --markdown
"$python" -m benchmarks.kernels.report --html "$out/kernels.html"
