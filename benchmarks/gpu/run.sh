#!/usr/bin/env bash
# Everything that needs a GPU, in one go: the GPU tests, compute-sanitizer's checkers, the streaming suites.
#   bash benchmarks/gpu/run.sh [tests] [memcheck] [stream_gpu] [stream_flux]        (no argument: all)
# Each part has a time limit in seconds: TESTS_S, MEMCHECK_S, SUITE_S (each suite). A suite that is cut keeps its rows.
# TESTS names other test files than all. Only by name: racecheck, synccheck, and the suites fp8 (needs torchao), packed, allgather.
# Logs and results go to $OUT if that is set, else the results to benchmarks/results. The last lines say how each ended.
set -u -o pipefail
cd "$(dirname "$0")/../.." || exit 1
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
logs=${OUT:-$(mktemp -d)}
machine=${MACHINE:-$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr 'A-Z ' 'a-z-' | sed 's/^nvidia-//')}
status=0
summary=()

step() { # name, seconds, command
  local name=$1 limit=$2 began=$SECONDS ended=0
  shift 2
  printf '=== %s\n' "$name"
  timeout --kill-after=10 "$limit" "$@" >"$logs/$name.log" 2>&1 || ended=$?
  case $name in
    *check) grep -E 'ERROR SUMMARY|equal to the bit|^=+ Error' "$logs/$name.log" | tail -n 3 ;;
    tests) grep -E '^(FAILED|ERROR|E  )|passed|failed|error' "$logs/$name.log" | tail -n 40
      cat "$logs/gpu-facts.txt" 2>/dev/null ;;
    *) tail -n 90 "$logs/$name.log" | cut -c -220 ;;
  esac
  [ "$ended" -eq 0 ] || status=1
  summary+=("$name: exit status $ended after $((SECONDS - began)) s")
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
for part in "${@:-tests memcheck stream_gpu stream_flux}"; do
  for name in $part; do
    case $name in
      tests) # shellcheck disable=SC2086  # several paths
        step tests "${TESTS_S:-110}" python3 -m pytest -m gpu ${TESTS:-tests/gpu tests/dlo/test_dlo_device.py} -q -p no:cacheprovider ;;
      memcheck) step memcheck "${MEMCHECK_S:-60}" compute-sanitizer --tool memcheck --report-api-errors no \
        --error-exitcode 9 python3 -m benchmarks.stream_memcheck ;;
      racecheck | synccheck) # not cuDNN's and cuBLAS's own kernels, which are found fault with
        step "$name" "${MEMCHECK_S:-60}" compute-sanitizer --tool "$name" --error-exitcode 9 \
          --kernel-name-exclude kns=cudnn --kernel-name-exclude kns=gemm python3 -m benchmarks.stream_memcheck ;;
      *) step "$name" "${SUITE_S:-180}" python3 -m benchmarks "$name" --machine "$machine" ;;
    esac
  done
done
printf '%s\n' "${summary[@]}"
exit "$status"
