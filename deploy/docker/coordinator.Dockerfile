# The coordinator: admission, ledger and the HTTP API.
#
# Build from the repository's root:
#
#   docker build -f deploy/docker/coordinator.Dockerfile -t "$REGISTRY/penstock-coordinator:0.2.0" .
#
# BASE may be any Debian bookworm with Python 3.11 or newer; pin it by digest for builds that can be repeated.
ARG BASE=python:3.12.12-slim-bookworm

# Packages are a layer of their own, which a change of the code leaves as it is.
FROM ${BASE} AS packages
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/penstock && echo /opt/code > "$(echo /opt/penstock/lib/python3.*/site-packages)/code.pth"
COPY deploy/docker/locks/coordinator.txt lock.txt
RUN /opt/penstock/bin/pip install --require-hashes --no-deps -r lock.txt && /opt/penstock/bin/pip check

FROM packages AS code
COPY deploy/docker/locks/build.txt ./
RUN /opt/penstock/bin/pip install --require-hashes -r build.txt
COPY pyproject.toml README.md LICENSE ./
COPY penstock/__init__.py penstock/py.typed penstock/
COPY shared penstock/shared
COPY services/__init__.py penstock/services/
COPY services/coordinator penstock/services/coordinator
RUN /opt/penstock/bin/pip install --no-deps --no-build-isolation --target /opt/code . && rm -r /opt/code/bin

FROM ${BASE}
# The base has no byte code, which no process here could write: each would compile what it imports of the standard library.
RUN python -m compileall -q -j 0 "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin penstock
COPY --from=packages /opt/penstock /opt/penstock
COPY --from=code /opt/code /opt/code
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "penstock.services.coordinator"]
