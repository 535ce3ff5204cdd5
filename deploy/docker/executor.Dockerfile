# The executor: runs untrusted programs for the code scorer. It holds no scorer, no bus client's settings and no secret.
#
# Build from the repository's root:
#
#   docker build -f deploy/docker/executor.Dockerfile -t "$REGISTRY/penstock-executor:0.1.0" .
#
# BASE may be any Debian with this Python; pin it by digest for builds that can be repeated.
ARG BASE=python:3.12.12-slim-bookworm

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/penstock
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY shared shared
COPY services/__init__.py services/py.typed services/
COPY services/reward/__init__.py services/reward/
COPY services/reward/executor services/reward/executor
RUN /opt/penstock/bin/pip install -c constraints.txt '.' && rm /opt/penstock/bin/penstock

FROM ${BASE}
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin penstock
COPY --from=build /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "services.reward.executor"]
