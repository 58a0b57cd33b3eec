#!/usr/bin/env bash
# Rewrite the *.lock.txt files from the *-requirements.txt beside them: pins only, with no index, host or path
# in them, so that they hold wherever pip is configured to look.  Needs `uv`, which the package index has.
#
#   build-support/lock.sh              keep every pin that still fits
#   build-support/lock.sh --upgrade    move every pin to its newest version
#   build-support/lock.sh -P NAME      move one (see `uv pip compile --help`)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lock() {
  uv pip compile --quiet --no-header --no-annotate --no-emit-index-url --no-emit-find-links "$@"
}
user() { lock --no-config --python-version 3.11 --python-platform x86_64-manylinux_2_28 "$@"; }
d=3rdparty/python

# Compiled without find-links: `uv` would write torch's "+cpu" into the pin, which no other machine has.
unset UV_FIND_LINKS PIP_FIND_LINKS
user "$d/requirements.txt" -o "$d/default-cuda.lock.txt" "$@"
# The same without what only the CUDA build of torch asks for; .pants.bootstrap says which one applies.
grep -vE '^(cuda-|nvidia-|triton==)' "$d/default-cuda.lock.txt" > "$d/default-cpu.lock.txt"
for tool in pytest mypy ruff codegen build import-linter; do
  user --constraints "$d/default-cuda.lock.txt" "$d/$tool-requirements.txt" -o "$d/$tool.lock.txt" "$@"
done
# Pants itself, with hashes: it is installed before anything else could check it.
lock --generate-hashes --python-version 3.9 build-support/pants-requirements.txt -o build-support/pants.lock.txt "$@"
