# outcore serve. Not executed by us yet: no machine of ours runs Docker.
#   docker build -t outcore .                             # CPU
#   docker build -t outcore --build-arg EXTRA=cuda12 .    # NVIDIA; or cuda13. Run it with --gpus all
FROM python:3.12-slim AS build
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.12-slim
ARG EXTRA=cpu
# On CPUs MLX compiles kernels with g++; on GPUs it brings its own compiler, and the driver comes from the host.
RUN if [ "$EXTRA" = cpu ]; then \
      apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*; \
    fi
RUN --mount=from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/outcore-*.whl)[$EXTRA,json]"
RUN useradd --create-home outcore && mkdir /home/outcore/.cache && chown outcore /home/outcore/.cache
USER outcore
# Models of the Hub, computed prompts and drafts.
VOLUME /home/outcore/.cache
EXPOSE 8080
HEALTHCHECK --start-period=5m \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/health', timeout=5)"]
ENTRYPOINT ["outcore"]
# Needs OUTCORE_MODEL, OUTCORE_MEMORY and OUTCORE_API_KEY.
CMD ["serve", "--host", "0.0.0.0"]
