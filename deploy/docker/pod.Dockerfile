# The whole run in one container (run.kind = pod): every service, vLLM and a bus of its own, as `penstock up` starts them.
#
# Build from the repository's root:
#
#   docker build -f deploy/docker/pod.Dockerfile -t "$REGISTRY/penstock-pod:0.1.0" .
#
# BASE may be any Debian with this Python; pin it by digest for builds that can be repeated.
ARG BASE=python:3.12.12-slim-bookworm

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/penstock
ARG EXTRA=all,vllm,s3
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY penstock penstock
COPY shared shared
COPY services services
RUN /opt/penstock/bin/pip install -c constraints.txt ".[$EXTRA]"

FROM ${BASE}
# Triton compiles its launchers with the host's C compiler when a kernel is first used; NCCL loads the libraries of RDMA.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc=4:12.2.0-3 libc6-dev=2.36-9+deb12u* \
        ibverbs-providers=44.0-2 libibverbs1=44.0-2 librdmacm1=44.0-2 \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin penstock
COPY --from=build /opt/penstock /opt/penstock
# NVIDIA's container toolkit reads the first two; GKE mounts the driver where the third says.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility LD_LIBRARY_PATH=/usr/local/nvidia/lib64
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "services.cli"]
