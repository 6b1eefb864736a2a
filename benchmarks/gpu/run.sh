#!/usr/bin/env bash
# Everything that needs a GPU, in one go: the GPU tests, the memory checker, the streaming suites.
#   bash benchmarks/gpu/run.sh [tests] [memcheck] [stream_gpu] [stream_flux]        (no argument: all)
# Logs and results go to $OUT if that is set, else the results to benchmarks/results.
set -u -o pipefail
cd "$(dirname "$0")/../.." || exit 1
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
logs=${OUT:-$(mktemp -d)}
machine=${MACHINE:-$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr 'A-Z ' 'a-z-' | sed 's/^nvidia-//')}
status=0

step() { # name, seconds, command
  local name=$1 limit=$2
  shift 2
  printf '=== %s\n' "$name"
  timeout "$limit" "$@" 2>&1 | tee "$logs/$name.log" || status=1
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
for part in "${@:-tests memcheck stream_gpu stream_flux}"; do
  for name in $part; do
    case $name in
      tests) step tests "${TESTS_S:-300}" python3 -m pytest -m gpu tests/gpu tests/dlo/test_dlo_device.py -q -p no:cacheprovider ;;
      memcheck) step memcheck "${MEMCHECK_S:-240}" compute-sanitizer --tool memcheck --error-exitcode 9 \
        python3 -m pytest -m gpu tests/gpu -q -p no:cacheprovider -k "bit_equal_and_comes_back and 2" ;;
      *) step "$name" "${SUITE_S:-420}" python3 -m benchmarks "$name" --machine "$machine" ;;
    esac
  done
done
exit "$status"
