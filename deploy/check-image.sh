#!/usr/bin/env bash
# Start the gateway image and see that it does what its Dockerfile promises: deploy/check-image.sh
#
# It runs with neither engine nor ledger: /health and /metrics must answer, /ready must say 503, and SIGTERM must
# end it. Also: no torch inside, not root, and only /tmp written to. Build it first: deploy/build-image.sh gateway
#
#   MODEL_DIR      a checkpoint's directory, for its tokenizer   [.state/models/k3-tiny]
#   IMAGE_PREFIX, IMAGE_TAG, BUILDER                             [as for build-image.sh]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/builder.sh
source deploy/builder.sh

START_TIMEOUT_S=60
STOP_TIMEOUT_S=20

builder=$(choose_builder)
image=$(image_name gateway)
model=$(realpath --canonicalize-missing "${MODEL_DIR:-.state/models/k3-tiny}")
[[ -r ${model}/tokenizer.json || -r ${model}/tiktoken.model ]] \
    || fail "${model} has no tokenizer: make the tiny checkpoint with 'longhaul model build', or set MODEL_DIR"
# Discard's port: nobody listens there.
arguments=(--model /models/k3 --engine http://127.0.0.1:9 --ledger redis://127.0.0.1:9/0)

start_docker() {
    container=$(docker run --detach --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges \
        --publish 127.0.0.1::8000 --volume "${model}:/models/k3:ro" "${image}" \
        gateway --host 0.0.0.0 --port 8000 "${arguments[@]}")
    trap 'docker rm --force "${container}" >/dev/null' EXIT
    url=http://$(docker port "${container}" 8000/tcp)
    probe_url=http://127.0.0.1:8000
}
inside_docker() { docker exec "${container}" "$@"; }
alive_docker() { [[ $(docker inspect --format '{{.State.Running}}' "${container}") == true ]]; }
logs_docker() { docker logs "${container}" 2>&1; }
stop_docker() {
    docker stop --time "${STOP_TIMEOUT_S}" "${container}" >/dev/null
    status=$(docker inspect --format '{{.State.ExitCode}}' "${container}")
}

# Chroot isolation shares the machine's network and process ids: the port must be free, and the signal goes to
# the gateway itself, as the kernel would send it to a container's first process.
start_buildah() {
    local port
    container=$(buildah from "${image}")
    work=$(mktemp -d)
    trap 'end_buildah' EXIT
    port=$(free_port)
    buildah run --cap-drop ALL --volume "${model}:/models/k3:ro" "${container}" -- \
        sh -c 'echo $$ >/tmp/gateway.pid && exec "$@"' sh \
        longhaul gateway --host 127.0.0.1 --port "${port}" "${arguments[@]}" >"${work}/log" 2>&1 &
    runner=$!
    url=http://127.0.0.1:${port}
    probe_url=${url}
}
end_buildah() {
    kill -KILL "$(gateway_pid)" 2>/dev/null || true
    wait "${runner}" 2>/dev/null || true
    buildah rm "${container}" >/dev/null
    rm -rf "${work}"
}
gateway_pid() { buildah run "${container}" -- cat /tmp/gateway.pid; }
inside_buildah() { buildah run "${container}" -- "$@"; }
alive_buildah() { kill -0 "${runner}" 2>/dev/null; }
logs_buildah() { cat "${work}/log"; }
stop_buildah() {
    local pid
    pid=$(gateway_pid)
    kill -TERM "${pid}"
    for ((tick = 0; tick < STOP_TIMEOUT_S * 10; tick++)); do
        [[ -e /proc/${pid} ]] || break
        sleep 0.1
    done
    [[ ! -e /proc/${pid} ]] || wrong "still there ${STOP_TIMEOUT_S} s after SIGTERM"
    status=0
    wait "${runner}" || status=$?
}
free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

wrong() {
    say "WRONG: $*"
    logs_"${builder}" >&2
    exit 1
}
status_of() { curl --silent --output /dev/null --write-out '%{http_code}' --max-time 5 "$1" || true; }

started=${EPOCHREALTIME/./}
start_"${builder}"
until [[ $(status_of "${url}/health") == 200 ]]; do
    alive_"${builder}" || wrong "the gateway ended before it answered"
    ((${EPOCHREALTIME/./} - started < START_TIMEOUT_S * 1000000)) || wrong "no answer within ${START_TIMEOUT_S} s"
    sleep 0.1
done
say "/health answers 200 after $(((${EPOCHREALTIME/./} - started) / 1000)) ms: $(curl --silent "${url}/health")"

[[ $(status_of "${url}/metrics") == 200 ]] || wrong "/metrics answers $(status_of "${url}/metrics")"
[[ $(status_of "${url}/ready") == 503 ]] || wrong "/ready answers $(status_of "${url}/ready") without an engine"
say "/metrics answers 200, /ready 503 without an engine"

inside_"${builder}" probe "${probe_url}/health" || wrong "the health check fails in the container"
[[ $(inside_"${builder}" id -u) == 10001 ]] || wrong "runs as user $(inside_"${builder}" id -u)"
inside_"${builder}" python3 -c '
import importlib.util, sys
found = [name for name in ("torch", "sglang", "transformers", "triton") if importlib.util.find_spec(name)]
sys.exit(f"installed: {found}" if found else 0)' || wrong "the gateway's image carries the engine's packages"
inside_"${builder}" sh -c '! touch /opt/longhaul/x 2>/dev/null && ! touch /usr/x 2>/dev/null' \
    || wrong "its user can write to the program"
say "health check passes inside; user 10001; no torch; the program is not writable"

stop_"${builder}"
[[ ${status} == 0 || ${status} == 143 ]] || wrong "ended with status ${status} after SIGTERM"
say "SIGTERM ends it with status ${status}"
say "${image}: as promised"
