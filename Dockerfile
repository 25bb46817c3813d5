# Shoal's image, one for all roles: the command names the role (`docker run shoal server`). See docs/how-to/image.md.
#
#     docker build --target shoal --tag shoal:0.1.0 .
#     docker build --target gpu --build-arg BASE=nvidia/cuda:12.6.3-runtime-ubuntu24.04 --tag shoal:0.1.0-gpu .
#
# It builds with and without BuildKit. A tag can move to other contents; a digest cannot (docs/how-to/image.md, "How do I pin
# the base image?"): --build-arg BASE=python:3.11-slim-bookworm@sha256:...
ARG BASE=python:3.11-slim-bookworm


# CUDA's images have no Python, so Ubuntu's is installed.
FROM ${BASE} AS base
RUN command -v python3 || { \
        apt-get update \
        && apt-get install --yes --no-install-recommends python3 python3-venv \
        && rm -rf /var/lib/apt/lists/*; \
    }


FROM base AS build
ARG EXTRAS=data,images,otel,s3,tensorboard
WORKDIR /src
COPY deploy/image/install.sh deploy/image/
COPY requirements requirements
RUN deploy/image/install.sh dependencies "${EXTRAS}"
COPY pyproject.toml README.md LICENSE THIRD_PARTY.md ./
COPY client client
COPY server server
COPY worker worker
COPY examples examples
COPY tools/release/commit_hook.py tools/release/readme_hook.py tools/release/
ARG REVISION=
# The build of the wheel reads this variable, because .git is not in the build context.
RUN SHOAL_REVISION="${REVISION}" deploy/image/install.sh shoal
# Kernels for all processor levels, so that no role compiles at its start (docs/decisions/0035).
RUN /opt/shoal/bin/shoal compile /opt/shoal/kernels
COPY deploy/image/health.py /opt/shoal/health.py


FROM base AS shoal
ARG BASE
# A new volume gets the owner of the folder at which it is first mounted. deploy/compose/certs.sh writes to those in tls.
RUN echo shoal:x:65532: >> /etc/group \
 && echo shoal:x:65532:65532::/tmp:/usr/sbin/nologin >> /etc/passwd \
 && mkdir --parents /programs /var/lib/shoal/store /var/lib/shoal/checkpoints \
 && for role in ca coordinator server worker submitter reader; do mkdir --parents /var/lib/shoal/tls/$role; done \
 && chown --recursive 65532:65532 /var/lib/shoal
COPY --from=build /opt/shoal /opt/shoal
# All interfaces: a container has an address of its own, and its network decides who can reach it.
ENV PATH=/opt/shoal/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    SHOAL_KERNELS=/opt/shoal/kernels \
    SHOAL_LISTEN=0.0.0.0:7070 \
    SHOAL_LANE_PORT=7071 \
    SHOAL_PAGE_LISTEN=0.0.0.0:7080 \
    SHOAL_METRICS_LISTEN=0.0.0.0:7090 \
    SHOAL_STORE=/var/lib/shoal/store/coordinator.db \
    SHOAL_PATH=/programs \
    SHOAL_LOG_FORMAT=json
USER 65532:65532
WORKDIR /programs
EXPOSE 7070 7071 7080 7090
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python3", "-I", "-S", "/opt/shoal/health.py"]
ENTRYPOINT ["shoal"]
CMD ["--help"]
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="shoal" \
      org.opencontainers.image.description="A parameter-server cluster for training" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}"


# The same for GPUs. Its base has to be an image of CUDA, whose version selects the installed packages.
FROM shoal AS gpu
RUN test -n "${CUDA_VERSION}" || { \
        echo "the target gpu wants a base with CUDA: --build-arg BASE=nvidia/cuda:12.6.3-runtime-ubuntu24.04" >&2; \
        exit 2; \
    }


# The default, which a build without a target makes.
FROM shoal
