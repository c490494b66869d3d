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
for kind in portable avx2; do
  extra=()
  if [ "$kind" = avx2 ]; then
    [ "$(uname -m)" = x86_64 ] || continue
    extra=(-mavx2 -mfma -mf16c)
    flags+=(-DHAS_avx2)
  fi
  c++ "${flags[@]}" "${extra[@]}" -Wno-psabi -DKERNELS=$kind -c "$root/native/src/kernels.cpp" -o "$build/$kind.o"
  objects+=("$build/$kind.o")
done
c++ "${flags[@]}" -shared "${sources[@]}" "${objects[@]}" -o "$build/asbuilt_native/libasbuilt_kernels.so" -lpthread
cp "$root/native/asbuilt_native/__init__.py" "$build/asbuilt_native/"
LD_PRELOAD="$preload" PYTHONPATH="$build:$root/src" \
  "$python" -m pytest -q -p no:cacheprovider "$root/tests/kernels/test_native.py"
