# A rollout server with SGLang, from the checked-in lock; and the trainer with it. See docs/containers.md.
#
#   docker build -f docker/sglang.Dockerfile -t treadle-sglang .                    (a server, CUDA)
#   docker build -f docker/sglang.Dockerfile -t treadle-sglang:cpu --build-arg VARIANT=cpu .
#   docker build -f docker/sglang.Dockerfile -t treadle-sglang-train --target train .   (after the trainer's image)
ARG PYTHON=python:3.11-slim-bookworm
ARG TRAINER=treadle-trainer

FROM ${PYTHON} AS build
ARG VARIANT=cuda
SHELL ["/bin/bash", "-o", "errexit", "-o", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY 3rdparty/python/sglang-${VARIANT}.lock.txt lock.txt
# The lock is complete: nothing is resolved. The secret is a pip.conf, for those with their own index.
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    python3 -m venv /opt/sglang \
    && /opt/sglang/bin/pip install --no-deps -r lock.txt
COPY proto proto
COPY packages packages
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    /opt/sglang/bin/pip install --no-deps ./proto ./packages/tracing ./packages/rollout_server

# The trainer starts the servers itself: rollout.server_command=[/opt/sglang/bin/treadle-rollout-server].
FROM ${TRAINER} AS train
COPY --from=build /opt/sglang /opt/sglang

FROM ${PYTHON} AS server
# The engine compiles kernels with gcc and g++ when it starts.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libc6-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 treadle \
    && install -d -o treadle -g treadle /home/treadle/.cache
COPY --from=build /opt/sglang /opt/sglang
ENV PATH=/opt/sglang/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /home/treadle
ENTRYPOINT ["treadle-rollout-server"]
CMD ["doctor", "--engine", "sglang"]
