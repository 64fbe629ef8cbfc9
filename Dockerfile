# `tpuport serve` on a TPU machine. Build: docker build -t tpuport .
FROM python:3.12-slim

# torch for CPUs: what runs on the TPU is JAX, and torch for CUDA is several GB more.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY tpuport tpuport
COPY cli cli
RUN pip install ".[serve,lora,gcs]" && rm -rf /src

# Compiled programs, jobs, and weights of the hub: a volume, or they go with the container.
ENV TPUPORT_CACHE_DIR=/cache HF_HOME=/cache/hub
VOLUME /cache
WORKDIR /cache

# The device files of a TPU belong to root, so the server runs as root.
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
    CMD python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"
ENTRYPOINT ["tpuport"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000", "--api-key-file", "/keys/keys"]
