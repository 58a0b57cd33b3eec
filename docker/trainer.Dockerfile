# The trainer: `treadle` with the checked-in lock. See docs/containers.md.
#
#   docker build -f docker/trainer.Dockerfile -t treadle-trainer .                          (CUDA)
#   docker build -f docker/trainer.Dockerfile -t treadle-trainer:cpu --build-arg VARIANT=cpu .
#
# torch's wheels bring CUDA; the driver comes from the host (`--gpus all`), so that no CUDA image is needed.
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
ARG VARIANT=cuda
SHELL ["/bin/bash", "-o", "errexit", "-o", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY 3rdparty/python/default-${VARIANT}.lock.txt lock.txt
# The lock is complete: nothing is resolved. The secret is a pip.conf, for those with their own index.
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    python3 -m venv /opt/treadle \
    && /opt/treadle/bin/pip install --no-deps -r lock.txt
COPY proto proto
COPY packages packages
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    /opt/treadle/bin/pip install --no-deps \
      ./proto ./packages/tracing ./packages/agent_loop ./packages/tools ./packages/policy ./packages/rollout_server ./packages/trainer

FROM ${PYTHON}
# triton compiles its launcher with gcc, engines of the target `train` their kernels with g++.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libc6-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 treadle \
    && install -d -o treadle -g treadle /runs /home/treadle/.cache
COPY --from=build /opt/treadle /opt/treadle
ENV PATH=/opt/treadle/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /runs
ENTRYPOINT ["treadle"]
CMD ["doctor"]
