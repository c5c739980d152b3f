#!/usr/bin/env bash
# On a GPU machine without a network: puts the wheels of `make gpu-wheels` beside the machine's own
# packages, and runs the queue with the arguments given: bench/gpu_machine.sh --minutes 12
set -euo pipefail
cd "$(dirname "$0")/.."
# Each set of wheels has a directory of its own: their names say which versions they are.
wheels=$(cd .wheels && printf '%s\n' *.whl | sha256sum | cut -c 1-16)
site=${SPECJAX_SITE:-${TMPDIR:-/tmp}/specjax-site}/$wheels
if [ ! -e "$site/.installed" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$site" .wheels/*.whl
    touch "$site/.installed"
fi
export PYTHONPATH="$PWD:$site"
exec python3 -m bench.gpu "$@"
