# syntax=docker/dockerfile:1
# docker build -t glm-multiuser . && docker run --init -p 127.0.0.1:8000:8000 glm-multiuser
# See docs/deployment.md.

FROM python:3.11-bookworm AS wheel
WORKDIR /sources
COPY . .
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
# MindSpore needs OpenMP, of which there is one version in a release of Debian.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    python -m pip install --no-cache-dir -c /constraints.txt "$(echo /wheels/*.whl)[server,structured,otel]"

# Packed weights are on disk, in a volume if there is one: in memory they would be there twice.
RUN install -d -o 10001 -g 10001 /var/cache/glm-multiuser
ENV GLM_MULTIUSER_WEIGHT_CACHE=/var/cache/glm-multiuser
# Other caches go to /tmp, so that the rest of the file system can be read-only.
ENV HOME=/tmp
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "from http.client import HTTPConnection as C; c = C('127.0.0.1', 8000, timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["glm-multiuser", "serve", "--host", "0.0.0.0"]
CMD ["--checkpoint", "ckpt/glm-tiny"]
