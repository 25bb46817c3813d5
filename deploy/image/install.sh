#!/bin/sh
# Installs Shoal's dependencies, and then Shoal, into /opt/shoal, a virtual environment without pip. There are two steps, so
# that after a change of the sources the build does not fetch all dependencies again. The lock files in requirements/ name
# each file by its hash. A base image with CUDA sets CUDA_VERSION. In this case the first step also installs CuPy, and the
# CUDA headers with which CuPy compiles its kernels. CUDA's runtime images do not contain these headers.
#
#     install.sh dependencies EXTRA,EXTRA
#     install.sh shoal
set -eu

build() {
    /opt/build/bin/python3 "$@"
}

pip() {
    build -m pip --disable-pip-version-check --no-cache-dir "$@"
}

step=$1
case $step in
dependencies)
    extras=$2 headers=
    case ${CUDA_VERSION-} in
    '') ;;
    12.*.*) extras=$extras,gpu headers=nvidia-cuda-runtime-cu12 ;;
    13.*.*) extras=$extras,gpu13 headers=nvidia-cuda-runtime ;;
    *)
        echo "install.sh: there is a CuPy for CUDA 12 and 13; CUDA_VERSION, which the base sets, is $CUDA_VERSION" >&2
        exit 2
        ;;
    esac
    set -- --requirement requirements/base.txt
    for extra in $(echo "$extras" | tr , ' '); do
        if ! [ -f "requirements/$extra.txt" ]; then
            echo "install.sh: EXTRAS has '$extra', but there is no requirements/$extra.txt" >&2
            exit 2
        fi
        set -- "$@" --requirement "requirements/$extra.txt"
    done
    if [ -n "$headers" ]; then
        if ! grep "^$headers==${CUDA_VERSION%.*}\." requirements/cuda-headers.txt > /tmp/cuda-headers.txt; then
            echo "install.sh: requirements/cuda-headers.txt has no headers for CUDA_VERSION $CUDA_VERSION, which the base sets" >&2
            exit 2
        fi
        set -- "$@" --requirement /tmp/cuda-headers.txt
    fi
    python3 -m venv /opt/build
    python3 -m venv --without-pip /opt/shoal
    pip install --progress-bar off --root-user-action ignore --require-hashes \
        --requirement requirements/build.txt --requirement requirements/sbom.txt
    pip --python /opt/shoal/bin/python3 install --progress-bar off --root-user-action ignore --require-hashes "$@"
    ;;
shoal)
    # No --python here: pip would not apply it to the program that builds a wheel.
    pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/wheels .
    pip --python /opt/shoal/bin/python3 install --root-user-action ignore --no-deps --no-index /tmp/wheels/shoal-*.whl
    build -m cyclonedx_py environment --pyproject pyproject.toml --output-reproducible \
        --output-file /opt/shoal/sbom.cdx.json /opt/shoal/bin/python3
    ;;
*)
    echo "install.sh: 'dependencies EXTRAS' or 'shoal', not '$step'" >&2
    exit 2
    ;;
esac
