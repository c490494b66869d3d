#!/usr/bin/env bash
# Runs the tests of the native kernels under the address and undefined-behaviour sanitizers.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
build="${TMPDIR:-/tmp}/asbuilt-sanitized"
mkdir -p "$build/asbuilt_native"
# Python is not built with the sanitizers, so their run-time library comes first; what torch and Python leak is theirs.
preload="$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0
if ! (echo 'int one() { return 1; }' | c++ -x c++ -shared -fPIC -fsanitize=address,undefined - -o "$build/probe.so" &&
  LD_PRELOAD="$preload" "$python" -c "import ctypes; ctypes.CDLL('$build/probe.so')") 2>"$build/probe.log"; then
  echo "the sanitizers do not run here: $(tail -1 "$build/probe.log")"
  exit 0
fi
sources=("$root"/native/src/interface.cpp "$root"/native/src/pool.cpp)
flags=(-std=gnu++17 -O1 -g -fPIC -fvisibility=hidden -fsanitize=address,undefined -fno-sanitize-recover=undefined)
objects=()
kinds=(portable)
# The code for AVX-512 in AVX2 instructions, that for tiles in plain ones: tested where there are none.
[ "$(uname -m)" = x86_64 ] && kinds+=(avx2 avx512 amx) && flags+=(-DHAS_avx2 -DHAS_avx512 -DHAS_amx)
[ "$(uname -m)" = aarch64 ] && kinds+=(neon neon_dot) && flags+=(-DHAS_neon -DHAS_neon_dot)
for kind in "${kinds[@]}"; do
  extra=()
  source=kernels
  [[ $kind = a* ]] && extra=(-mavx2 -mfma -mf16c)
  [[ $kind = neon* ]] && extra=(-DNEON)
  [ "$kind" = neon_dot ] && extra+=(-march=armv8.2-a+dotprod)
  [ "$kind" = avx512 ] || [ "$kind" = amx ] && extra+=(-DEMULATED)
  [ "$kind" = amx ] && source=tiles
  c++ "${flags[@]}" "${extra[@]}" -Wno-psabi -DKERNELS=$kind -c "$root/native/src/$source.cpp" -o "$build/$kind.o"
  objects+=("$build/$kind.o")
done
[ "$(uname -m)" = x86_64 ] && flags+=(-DEMULATED)
c++ "${flags[@]}" -shared "${sources[@]}" "${objects[@]}" -o "$build/asbuilt_native/libasbuilt_kernels.so" -lpthread
cp "$root/native/asbuilt_native/__init__.py" "$build/asbuilt_native/"
LD_PRELOAD="$preload" PYTHONPATH="$build:$root/src" \
  "$python" -m pytest -q -p no:cacheprovider "$root/tests/kernels/test_native.py" "$root/tests/kernels/test_training_attention.py"
