#!/bin/sh
# Installs Shoal's dependencies, and then Shoal, into /opt/shoal, a virtual environment without pip. There are two steps, so
# that after a change of the sources the build does not fetch all dependencies again. A base image with CUDA sets
# CUDA_VERSION. In this case the first step also installs CuPy, and the CUDA headers with which CuPy compiles its kernels.
# CUDA's runtime images do not contain these headers.
#
#     install.sh dependencies EXTRA,EXTRA
#     install.sh shoal
set -eu

pip() {
    /opt/build/bin/python3 -m pip --python /opt/shoal/bin/python3 --disable-pip-version-check --no-cache-dir "$@"
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
    python3 -m venv /opt/build
    python3 -m venv --without-pip /opt/shoal
    python3 deploy/image/requirements.py "$extras" > /tmp/requirements.txt
    pip install --progress-bar off --root-user-action ignore --requirement /tmp/requirements.txt \
        ${headers:+"$headers==${CUDA_VERSION%.*}.*"}
    ;;
shoal)
    # No --python here: pip would not apply it to the environment in which it builds a wheel.
    /opt/build/bin/python3 -m pip --disable-pip-version-check --no-cache-dir wheel --no-deps --wheel-dir /tmp/wheels .
    pip install --root-user-action ignore --no-deps --no-index /tmp/wheels/shoal-*.whl
    ;;
*)
    echo "install.sh: 'dependencies EXTRAS' or 'shoal', not '$step'" >&2
    exit 2
    ;;
esac
