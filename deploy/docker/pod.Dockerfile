# The whole run in one container (run.kind = pod): every service, vLLM and a bus of its own, as `penstock up` starts them.
#
# Build from the repository's root:
#
#   docker build -f deploy/docker/pod.Dockerfile -t "$REGISTRY/penstock-pod:0.2.0" .
#
# BASE may be any Debian bookworm with Python 3.11 or newer; pin it by digest for builds that can be repeated.
ARG BASE=python:3.12.12-slim-bookworm

# Packages are a layer of their own, which a change of the code leaves as it is.
FROM ${BASE} AS packages
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/penstock && echo /opt/code > "$(echo /opt/penstock/lib/python3.*/site-packages)/code.pth"
COPY deploy/docker/locks/build.txt ./
COPY deploy/docker/locks/pod.txt lock.txt
# DeepSpeed has no wheel; it is built with the packages of build.txt. The lock is complete; pip's own resolution refuses a
# dependency with an extra (nvidia-cutlass-dsl[cu13]) that it pins without.
RUN /opt/penstock/bin/pip install --require-hashes -r build.txt \
    && /opt/penstock/bin/pip install --require-hashes --no-deps --no-build-isolation -r lock.txt && /opt/penstock/bin/pip check

FROM packages AS code
COPY deploy/docker/locks/build.txt ./
RUN /opt/penstock/bin/pip install --require-hashes -r build.txt
COPY pyproject.toml README.md LICENSE ./
COPY penstock/__init__.py penstock/py.typed penstock/
COPY shared penstock/shared
COPY services penstock/services
RUN /opt/penstock/bin/pip install --no-deps --no-build-isolation --target /opt/code . && rm -r /opt/code/bin

FROM ${BASE}
# The base has no byte code, which no process here could write: each would compile what it imports of the standard library.
RUN python -m compileall -q -j 0 "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
# Triton compiles its launchers with the host's C compiler when a kernel is first used; NCCL loads the libraries of RDMA.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc=4:12.2.0-3 libc6-dev=2.36-9+deb12u* \
        ibverbs-providers=44.0-2 libibverbs1=44.0-2 librdmacm1=44.0-2 \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin penstock
COPY --from=packages /opt/penstock /opt/penstock
COPY --from=code /opt/code /opt/code
# NVIDIA's container toolkit reads the first two; GKE mounts the driver where the third says.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility LD_LIBRARY_PATH=/usr/local/nvidia/lib64
# FlashInfer's sampler is compiled at the start by an nvcc, which this image does not have; vLLM's own sampler is not.
ENV VLLM_USE_FLASHINFER_SAMPLER=0
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "penstock.services.cli"]
