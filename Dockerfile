# One file, three images:
#
#   gateway   the HTTP gateway alone: no torch, not root, runs on a read-only root
#   cpu       everything for one machine without a GPU: `longhaul serve`, or any other command
#   engine    the plug-in and the store backend on the published SGLang image
#
# deploy/build-image.sh builds them, with docker or without it. The base must have python3 (3.11 or 3.12)
# with pip and be a Debian or an Ubuntu; nothing else is taken from it.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23

FROM ${PYTHON_IMAGE} AS uv
ARG UV_VERSION=0.13.9
# How a package index of one's own is named; without them PyPI is asked. They reach no final image, and each
# stage that asks an index declares them, since not every builder lets a stage inherit them.
ARG PIP_INDEX_URL
ARG PIP_CERT
ARG UV_DEFAULT_INDEX
ARG SSL_CERT_FILE
# --target leaves the distribution's own site-packages alone, which PEP 668 forbids to touch.
RUN --mount=type=secret,id=ca_bundle \
    python3 -m pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore \
        --target /opt/uv "uv==${UV_VERSION}"
ENV PATH=/opt/uv/bin:${PATH} \
    UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy \
    UV_NO_PROGRESS=1 \
    UV_PROJECT_ENVIRONMENT=/opt/longhaul \
    UV_PYTHON=python3 \
    UV_PYTHON_DOWNLOADS=never
WORKDIR /build
COPY pyproject.toml uv.lock ./

# The locked dependencies change far more seldom than the sources: they are layers of their own.
FROM uv AS gateway-environment
ARG UV_DEFAULT_INDEX
ARG SSL_CERT_FILE
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=secret,id=ca_bundle \
    uv sync --frozen --no-default-groups --no-install-project

FROM uv AS cpu-environment
ARG UV_DEFAULT_INDEX
ARG SSL_CERT_FILE
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=secret,id=ca_bundle \
    uv sync --frozen --no-default-groups --group engine --no-install-project

# Our wheel, the gateway's locked requirements, and the SGLang release that the plug-in is written for.
FROM uv AS wheel
ARG UV_DEFAULT_INDEX
ARG SSL_CERT_FILE
RUN mkdir /dist \
    && uv export --frozen --no-default-groups --no-emit-project --no-annotate --quiet \
        --output-file /dist/requirements.txt \
    && python3 -c 'import tomllib; print(*[p["version"] for p in tomllib.load(open("uv.lock", "rb"))["package"] if p["name"] == "sglang"])' \
        > /dist/sglang-version \
    && test -s /dist/sglang-version
COPY README.md ./
COPY service service
COPY model model
COPY speculative speculative
COPY cache_store cache_store
COPY replay replay
COPY bench bench
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=secret,id=ca_bundle \
    uv build --wheel --out-dir /dist

# An init for the images whose process has children of its own: it forwards signals and reaps.
FROM ${PYTHON_IMAGE} AS init
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*

FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="Longhaul" \
      org.opencontainers.image.description="An inference service for long agent sessions on Kimi K3, on SGLang"
ENV PATH=/opt/longhaul/bin:${PATH} \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    LONGHAUL_STATE=/var/lib/longhaul
# A number, since Kubernetes' runAsNonRoot can't look a name up. The directories exist so that a fresh
# volume mounted on one takes its owner.
RUN groupadd --gid 10001 longhaul \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/longhaul --shell /usr/sbin/nologin longhaul \
    && install --directory --owner=10001 --group=10001 /var/lib/longhaul /models
COPY deploy/probe.py /usr/local/bin/probe
WORKDIR /var/lib/longhaul
STOPSIGNAL SIGTERM

FROM runtime AS gateway
COPY --from=gateway-environment /opt/longhaul /opt/longhaul
RUN --mount=type=bind,from=uv,source=/opt/uv,target=/opt/uv --mount=type=bind,from=wheel,source=/dist,target=/dist \
    /opt/uv/bin/uv pip install --python /opt/longhaul/bin/python3 --offline --no-cache --no-deps --compile-bytecode \
        --link-mode copy /dist/*.whl
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=6s --start-period=30s --retries=3 CMD ["probe", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["longhaul"]
CMD ["gateway", "--host", "0.0.0.0", "--model", "/models/k3"]

FROM runtime AS cpu
# torch compiles for the CPU it meets; sglang asks libnuma for the node.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=init /usr/bin/tini-static /usr/local/bin/tini
COPY --from=cpu-environment /opt/longhaul /opt/longhaul
RUN --mount=type=bind,from=uv,source=/opt/uv,target=/opt/uv --mount=type=bind,from=wheel,source=/dist,target=/dist \
    /opt/uv/bin/uv pip install --python /opt/longhaul/bin/python3 --offline --no-cache --no-deps --compile-bytecode \
        --link-mode copy /dist/*.whl
USER 10001:10001
EXPOSE 8000 30000
HEALTHCHECK --interval=10s --timeout=6s --start-period=300s --retries=3 CMD ["probe", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["tini", "--", "longhaul"]
CMD ["serve", "--host", "0.0.0.0"]

# hadolint ignore=DL3006
FROM ${SGLANG_IMAGE} AS engine
ARG UV_DEFAULT_INDEX
ARG SSL_CERT_FILE
LABEL org.opencontainers.image.title="Longhaul engine" \
      org.opencontainers.image.description="SGLang with Longhaul's plug-in, launch profiles and store backend"
ENV PYTHONUNBUFFERED=1 \
    LONGHAUL_STATE=/var/lib/longhaul
COPY deploy/probe.py /usr/local/bin/probe
COPY --from=init /usr/bin/tini-static /usr/local/bin/tini
# Into the interpreter that has SGLang. The lock was resolved with this release of SGLang, so the pins agree
# with it; another release is refused here, and not only when the engine starts.
RUN --mount=type=bind,from=uv,source=/opt/uv,target=/opt/uv --mount=type=bind,from=wheel,source=/dist,target=/dist \
    --mount=type=secret,id=ca_bundle \
    installed="$(python3 -c 'import importlib.metadata as m; print(m.version("sglang"))')" \
    && wanted="$(cat /dist/sglang-version)" \
    && if [ "${installed}" != "${wanted}" ]; then \
        echo "SGLANG_IMAGE has sglang ${installed}, this source needs ${wanted}" >&2; exit 1; \
    fi \
    && python="$(command -v python3)" \
    && /opt/uv/bin/uv pip install --python "${python}" --break-system-packages --no-cache --requirements /dist/requirements.txt \
    && /opt/uv/bin/uv pip install --python "${python}" --break-system-packages --no-cache --offline --no-deps /dist/*.whl \
    && mkdir --parents /var/lib/longhaul
WORKDIR /var/lib/longhaul
STOPSIGNAL SIGTERM
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=6s --start-period=1800s --retries=3 CMD ["probe", "http://127.0.0.1:30000/health"]
ENTRYPOINT ["tini", "--", "longhaul"]
CMD ["engine", "--help"]
