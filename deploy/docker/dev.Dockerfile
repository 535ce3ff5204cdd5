# For development and for the CPU smoke run of deploy/k8s/examples: every service, the tests and the arithmetic example.
#
#   docker build -f deploy/docker/dev.Dockerfile -t "$REGISTRY/penstock-dev:0.2.0" .
#   docker run --rm -it "$REGISTRY/penstock-dev:0.2.0" -m penstock.services.cli up config/arithmetic.toml --run.folder /tmp/runs
ARG BASE=python:3.12.12-slim-bookworm

FROM ${BASE}
# The base has no byte code, which no process here could write: each would compile what it imports of the standard library.
RUN python -m compileall -q -j 0 "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN useradd --uid 10001 --user-group --create-home penstock && python -m venv /opt/penstock
WORKDIR /src
COPY deploy/docker/locks/dev.txt deploy/docker/locks/build.txt ./
RUN /opt/penstock/bin/pip install --require-hashes -r build.txt \
    && /opt/penstock/bin/pip install --require-hashes --no-build-isolation -r dev.txt -r build.txt
COPY pyproject.toml constraints.txt README.md LICENSE Makefile ./
COPY penstock penstock
COPY shared shared
COPY services services
COPY config config
COPY examples examples
COPY tests tests
COPY benchmarks benchmarks
COPY docs docs
COPY deploy deploy
RUN /opt/penstock/bin/pip install --no-deps --no-build-isolation -e . && python -m compileall -q -j 0 penstock tests benchmarks
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
ENTRYPOINT ["python"]
