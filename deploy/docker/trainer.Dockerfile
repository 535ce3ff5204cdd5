# The trainer: DeepSpeed over the pod's GPUs. PyTorch's wheels bring CUDA's libraries; the node brings the driver.
#
# Build from the repository's root:
#
#   docker build -f deploy/docker/trainer.Dockerfile -t "$REGISTRY/penstock-trainer:0.2.0" .
#
# LOCK=trainer-kernels adds 8-bit Adam, and kernels that save a tenth of a step.
# BASE may be any Debian bookworm with Python 3.11 or newer; pin it by digest for builds that can be repeated.
ARG BASE=python:3.12.12-slim-bookworm

# Packages are a layer of their own, which a change of the code leaves as it is.
FROM ${BASE} AS packages
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/penstock && echo /opt/code > "$(echo /opt/penstock/lib/python3.*/site-packages)/code.pth"
ARG LOCK=trainer
COPY deploy/docker/locks/build.txt ./
COPY deploy/docker/locks/${LOCK}.txt lock.txt
# DeepSpeed has no wheel; it is built with the packages of build.txt.
RUN /opt/penstock/bin/pip install --require-hashes -r build.txt \
    && /opt/penstock/bin/pip install --require-hashes --no-deps --no-build-isolation -r lock.txt && /opt/penstock/bin/pip check

FROM packages AS code
COPY deploy/docker/locks/build.txt ./
RUN /opt/penstock/bin/pip install --require-hashes -r build.txt
COPY pyproject.toml README.md LICENSE ./
COPY penstock/__init__.py penstock/py.typed penstock/
COPY shared penstock/shared
COPY services/__init__.py penstock/services/
COPY services/trainer penstock/services/trainer
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
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "penstock.services.trainer"]
