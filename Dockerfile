# The sidecar's image: two stages from one base, no torch, user 65532, works with a read-only root.
#   docker build -t kvtierd .
#   docker build -t kvtierd --build-arg EXTRAS=torch --build-arg TORCH_INDEX_URL=https://MIRROR/cpu .
# Behind an air gap: --build-arg PYTHON_IMAGE=MIRROR/python:3.12-slim-bookworm --build-arg PIP_INDEX_URL=https://MIRROR/simple
# A release pins PYTHON_IMAGE by digest.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
ARG PIP_INDEX_URL
ARG EXTRAS=""
ARG TORCH_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# What is downloaded is checked against hashes, the build backend included; kvtierd itself comes from this folder.
COPY deploy/image/requirements.txt deploy/image/build-requirements.txt /locks/
RUN python3 -m venv /build \
 && python3 -m venv --without-pip /opt/kvtierd \
 && /build/bin/pip install --require-hashes -r /locks/build-requirements.txt \
 && /build/bin/pip --python /opt/kvtierd/bin/python install --require-hashes --no-deps -r /locks/requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY kvtierd kvtierd
# The glue is what an engine without kvtierd in its own image can mount: the package alone, pure Python.
RUN /build/bin/pip wheel --no-build-isolation --no-deps --wheel-dir /wheels . \
 && /build/bin/pip --python /opt/kvtierd/bin/python install --no-index --no-deps /wheels/*.whl \
 && /build/bin/python -m zipfile -e /wheels/*.whl /opt/kvtierd/glue \
 && find /opt/kvtierd/lib -type d -name tests -prune -exec rm -rf {} + \
 && /opt/kvtierd/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/kvtierd/lib
COPY tests/requirements/constraints.txt /locks/
# torch has an index of its own for its CPU build; the default one brings gigabytes of CUDA. The daemon never imports it.
RUN if [ "${EXTRAS}" = torch ]; then \
      /build/bin/pip --python /opt/kvtierd/bin/python install -c /locks/constraints.txt \
        ${TORCH_INDEX_URL:+--index-url "${TORCH_INDEX_URL}"} torch numpy; \
    elif [ -n "${EXTRAS}" ]; then echo "EXTRAS is empty or torch, not ${EXTRAS}" >&2; exit 64; fi

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE}
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvtierd" \
      org.opencontainers.image.description="KV-cache tier daemon: a sidecar for LLM inference engines" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV PATH=/opt/kvtierd/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Written by hand: useradd warns about ids above 60000. The folders are for those who mount nothing.
RUN echo 'kvtierd:x:65532:65532:kvtierd:/nonexistent:/usr/sbin/nologin' >> /etc/passwd \
 && echo 'kvtierd:x:65532:' >> /etc/group \
 && install -d -m 0770 -o 65532 -g 65532 /run/kvtierd /var/lib/kvtierd /var/cache/kvtierd
COPY --from=build /opt/kvtierd /opt/kvtierd
COPY deploy/image/tiers.yaml /etc/kvtierd/tiers.yaml
USER 65532:65532
EXPOSE 5557 5558 9557
STOPSIGNAL SIGTERM
# For plain container engines; Kubernetes has its own probes.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s CMD ["kvtierd", "status", "--quiet"]
ENTRYPOINT ["kvtierd"]
CMD ["serve", "--config", "/etc/kvtierd/tiers.yaml"]
