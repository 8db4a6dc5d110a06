# Sourced by build-image.sh and check-image.sh: which builder, which names, and a base without a registry.
# shellcheck shell=bash

say() { printf 'longhaul: %s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 2
}

# The name of a target's image.
image_name() {
    local version
    version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
    printf '%s-%s:%s' "${IMAGE_PREFIX:-longhaul}" "$1" "${IMAGE_TAG:-${version}}"
}

# docker where its engine answers, else buildah; BUILDER overrides.
choose_builder() {
    local builder=${BUILDER:-}
    if [[ -z ${builder} ]]; then
        if docker info >/dev/null 2>&1; then builder=docker; else builder=buildah; fi
    fi
    case ${builder} in
        docker) ;;
        buildah)
            type -P buildah >/dev/null \
                || fail "no docker engine answers and buildah is not installed: start docker, or apt-get install buildah debootstrap"
            ;;
        *) fail "BUILDER must be docker or buildah, not '${builder}'" ;;
    esac
    printf '%s' "${builder}"
}

# No daemon and no user namespaces: this works as root in a plain virtual machine and in a container. Layers are
# overlay mounts where the file system has them, else copies (vfs), which takes minutes; STORAGE_DRIVER decides.
export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
buildah() { command buildah ${STORAGE_DRIVER:+--storage-driver "${STORAGE_DRIVER}"} "$@"; }

# Make, once, a base image with python3 and pip from Debian's packages; print its name.
debian_base() {
    local suite=bookworm base container root
    base=localhost/longhaul-base:${suite}
    if ! buildah inspect --type image "${base}" >/dev/null 2>&1; then
        command -v debootstrap >/dev/null \
            || fail "a base needs debootstrap (apt-get install debootstrap), or PYTHON_IMAGE naming an image to pull"
        [[ $(id -u) == 0 ]] || fail "debootstrap needs root; or name an image to pull with PYTHON_IMAGE"
        say "making ${base} with debootstrap"
        container=$(buildah from scratch)
        root=$(buildah mount "${container}")
        debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip \
            "${suite}" "${root}" ${DEBIAN_MIRROR:+"${DEBIAN_MIRROR}"} >&2
        rm -rf "${root}"/var/cache/apt/archives/*.deb "${root}"/var/lib/apt/lists/* "${root}"/var/log/*
        buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --env LANG=C.UTF-8 \
            --cmd bash "${container}" >&2
        buildah umount "${container}" >&2
        buildah commit --rm --format docker "${container}" "${base}" >&2
    fi
    printf '%s' "${base}"
}
