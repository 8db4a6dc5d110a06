#!/usr/bin/env bash
# Build the container images: deploy/build-image.sh [gateway|cpu|engine]...   (default: gateway)
#
# With docker where an engine runs. Without one, as root on Debian or Ubuntu, with buildah: no daemon, no
# registry; the base is then made by debootstrap, unless PYTHON_IMAGE names an image that buildah can pull.
#
#   IMAGE_PREFIX       images are named PREFIX-TARGET:TAG           [longhaul]
#   IMAGE_TAG          [the version in pyproject.toml]
#   PYTHON_IMAGE       base of gateway and cpu; all is built on it [python:3.11-slim-bookworm, or debootstrap's]
#   SGLANG_IMAGE       base of engine                               [see Dockerfile]
#   BUILD_ARGS         more build arguments, "NAME=VALUE NAME=VALUE", e.g. UV_DEFAULT_INDEX=https://...
#   CA_BUNDLE          certificates (PEM) to trust during the build, e.g. those of a proxy; not kept in the image
#   EXTRA_BUILD_FLAGS  more flags for `docker build` or `buildah build`
#   BUILDER            docker or buildah                            [what there is]
#   DEBIAN_MIRROR      where debootstrap takes Debian from          [debootstrap's own default]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/builder.sh
source deploy/builder.sh

targets=("${@:-gateway}")
for target in "${targets[@]}"; do
    case ${target} in
        gateway | cpu | engine) ;;
        *) fail "no target named '${target}'; there are: gateway, cpu, engine" ;;
    esac
done

builder=$(choose_builder)
flags=()
for argument in ${BUILD_ARGS:-}; do
    flags+=(--build-arg "${argument}")
done
if [[ -n ${CA_BUNDLE:-} ]]; then
    [[ -r ${CA_BUNDLE} ]] || fail "CA_BUNDLE: ${CA_BUNDLE} can't be read"
    # pip and uv read the mount of this secret; it is gone when the step that uses it ends.
    flags+=(--secret "id=ca_bundle,src=${CA_BUNDLE}")
    flags+=(--build-arg SSL_CERT_FILE=/run/secrets/ca_bundle --build-arg PIP_CERT=/run/secrets/ca_bundle)
fi
if [[ ${builder} == buildah && -z ${PYTHON_IMAGE:-} ]]; then
    PYTHON_IMAGE=$(debian_base)
fi
[[ -z ${PYTHON_IMAGE:-} ]] || flags+=(--build-arg "PYTHON_IMAGE=${PYTHON_IMAGE}")
[[ -z ${SGLANG_IMAGE:-} ]] || flags+=(--build-arg "SGLANG_IMAGE=${SGLANG_IMAGE}")
if revision=$(git rev-parse HEAD 2>/dev/null); then
    flags+=(--label "org.opencontainers.image.revision=${revision}")
fi
read -ra extra <<<"${EXTRA_BUILD_FLAGS:-}"

for target in "${targets[@]}"; do
    image=$(image_name "${target}")
    say "building ${image} with ${builder}"
    started=${SECONDS}
    if [[ ${builder} == docker ]]; then
        DOCKER_BUILDKIT=1 docker build --target "${target}" --tag "${image}" \
            --label "org.opencontainers.image.version=${image##*:}" "${flags[@]}" "${extra[@]}" .
        size=$(docker images --format '{{.Size}}' "${image}")
    else
        # HEALTHCHECK is kept by the docker format alone.
        buildah build --format docker --target "${target}" --tag "${image}" \
            --label "org.opencontainers.image.version=${image##*:}" "${flags[@]}" "${extra[@]}" .
        size=$(buildah images --json "${image}" | sed -n 's/.*"size": *"\([^"]*\)".*/\1/p')
    fi
    say "built ${image} (${size}) in $((SECONDS - started)) s"
done
