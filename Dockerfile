# tokenteller for the CPU, with its toy model inside: nothing is downloaded at start.
#
#   docker build -t tokenteller --build-arg TORCH_INDEX_URL=<the CPU index that torch's install page names> .
#   docker run --rm -p 8000:8000 --read-only --tmpfs /tmp tokenteller
#
# Only features that buildah 1.28 knows too (no COPY --link, no heredocs), so that deploy/build_image.sh can build this
# file where there is no Docker daemon.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm


FROM ${PYTHON_IMAGE} AS base

# libgomp1 for numba's OpenMP threads; torch brings its own copy. Any version will do, here and below.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*


# A stage of its own with a fixed file date: the install below is repeated only if a dependency changes, not for any other
# change in pyproject.toml.
FROM base AS requirements

COPY pyproject.toml /
RUN python3 -c "import tomllib; print(*tomllib.load(open('/pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > /requirements.txt \
    && touch -d @0 /requirements.txt


FROM base AS dependencies

# Where torch comes from. With neither set, pip takes the default index's torch, which on Linux carries gigabytes of CUDA.
# TORCH_INDEX_URL is one more package index; PIP_FIND_LINKS (pip reads it itself) a page or a mounted folder of wheels.
ARG TORCH_INDEX_URL=""
ARG PIP_FIND_LINKS=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1

# binutils for `strip`; pip in a venv of its own, so that the one we ship has none.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends binutils && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /pip \
    && python3 -m venv --without-pip /venv

COPY --from=requirements /requirements.txt /
RUN --mount=type=cache,target=/root/.cache/pip \
    /pip/bin/pip --python /venv/bin/python3 install -r /requirements.txt \
        ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"}

# Remove what is only needed to build or test these packages, and symbol tables: a third of the venv. torch_shm_manager
# stays, as importing torch looks for it. pip has already compiled the bytecode.
RUN site=$(echo /venv/lib/python3*/site-packages) \
    && rm -rf "$site/torch/test" "$site/torch/include" "$site/torch/share" \
    && find "$site/torch/bin" -type f ! -name torch_shm_manager -delete \
    && find "$site" -type d -name tests -prune -exec rm -r {} + \
    && strip --strip-unneeded "$site"/torch/lib/libtorch_cpu.so "$site"/torch/lib/libtorch_python.so \
        "$site"/llvmlite/binding/libllvmlite.so "$site"/uvloop/loop.*.so


FROM dependencies AS project

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY model/ model/
COPY server/ server/
# In a folder, hence a layer, of its own: an update of the server is a small download.
RUN --mount=type=cache,target=/root/.cache/pip \
    /pip/bin/pip --python /venv/bin/python3 install --no-deps --prefix /project .


FROM base

LABEL org.opencontainers.image.title="tokenteller" \
      org.opencontainers.image.description="Inference server that streams tokens from a KV-cached decoder (CPU)" \
      org.opencontainers.image.licenses="Apache-2.0"

COPY --from=dependencies /venv /venv
COPY --from=project /project /venv

# TOKENTELLER_HOST here and not in CMD, so that `docker run tokenteller serve --slots 8` still listens on all addresses.
# TOKENTELLER_SHUTDOWN_TIMEOUT: `docker stop` kills after 10 s, so running streams get 8 s to finish; raise it together
# with the stop grace period. HOME: a writable folder (a tmpfs), for libraries that keep a cache.
# hadolint ignore=DL3064
ENV PATH=/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    NUMBA_CACHE_DIR=/var/cache/numba \
    TOKENTELLER_HOST=0.0.0.0 \
    TOKENTELLER_SHUTDOWN_TIMEOUT=8

# A number: Kubernetes' runAsNonRoot cannot check a name.
RUN install -d -o 10001 -g 10001 /var/cache/numba
USER 10001:10001

# Compile the toy's kernels now, which saves seconds at every start on the same kind of CPU; others compile at start. A
# volume, so that those are kept, too, in a container whose root is read-only.
RUN python3 -m tokenteller.server generate "To be" --max-tokens 1
VOLUME /var/cache/numba

EXPOSE 8000
STOPSIGNAL SIGTERM

# Python, as slim images have no curl; http.client, as it ignores proxies that the environment may name.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python3", "-c", "import http.client, os; c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('TOKENTELLER_PORT', 8000)), timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]

# Exec form: the server itself is process 1 and receives the SIGTERM of `docker stop`.
ENTRYPOINT ["tokenteller"]
CMD ["serve"]
