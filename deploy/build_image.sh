#!/usr/bin/env bash
# Builds the image and runs it once, without a Docker daemon and without a container registry: a check for CI.
#
#   deploy/build_image.sh          build and check; exit code 0 means that everything below held
#   deploy/build_image.sh clean    remove what a run leaves behind: the image, its base, the build cache
#
# For root on Debian 12: the base image is made from Debian's own packages, whose Python is 3.11. pip in the build uses
# the settings, certificates and local wheels of this machine's pip; TORCH_INDEX_URL is passed on when it is set.
set -euo pipefail

image=localhost/tokenteller:latest
base=localhost/tokenteller-base:bookworm
name=tokenteller-check
url=http://127.0.0.1:8000
export DISABLE_HC_SYSTEMD=true # podman shall not ask systemd to run the health check; we run it ourselves

say() { printf '\n== %s\n' "$*"; }
fail() {
    printf 'FAILED: %s\n' "$*" >&2
    exit 1
}
seconds_since() { awk -v start="$1" -v now="$(date +%s.%N)" 'BEGIN { printf "%.1f", now - start }'; }

install_tools() {
    local command missing=()
    for command in buildah:buildah podman:podman crun:crun mmdebstrap:mmdebstrap ip:iproute2 curl:curl; do
        command -v "${command%:*}" >/dev/null || missing+=("${command#*:}")
    done
    if ((${#missing[@]})); then
        say "Installing ${missing[*]}"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "${missing[@]}" >/dev/null
    fi
}

# What python:3.11-slim-bookworm is for us: Debian with Python and venv. Made once and kept.
make_base() {
    if buildah inspect --type image "$base" >/dev/null 2>&1; then
        return
    fi
    say "Making the base image $base"
    # Like Debian's own images: no manuals, and apt keeps no caches that would end up in a layer.
    mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' \
        --aptopt='Dir::Cache::pkgcache ""' --aptopt='Dir::Cache::srcpkgcache ""' \
        bookworm "$work/base.tar"
    printf 'FROM scratch\nADD base.tar /\nENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin\n' >"$work/Dockerfile"
    buildah bud --quiet --format docker -t "$base" "$work"
    rm "$work/base.tar"
}

# Writes this machine's pip settings as one pip.conf and prints the local files and folders that they name.
pip_settings() {
    python3 - "$1" <<'PYTHON'
import ast, pathlib, subprocess, sys

KEYS = ("index-url", "extra-index-url", "find-links", "trusted-host", "cert", "default-timeout", "timeout", "proxy")
listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
values = {}
for line in listed.splitlines():
    key, _, value = line.partition("=")
    section, _, key = key.rpartition(".")
    if key in KEYS and (section == ":env:" or key not in values):  # the environment wins
        values[key] = ast.literal_eval(value).split()
with open(sys.argv[1], "w") as file:
    print("[global]", *(f"{key} = " + "\n    ".join(items) for key, items in values.items()), sep="\n", file=file)
for item in sorted({item for items in values.values() for item in items}):
    path = pathlib.Path(item.removeprefix("file://"))
    if path.is_absolute() and path.exists():
        print(path.parent if item.startswith("file://") else path)  # an index's files lie beside it
PYTHON
}

build() {
    local path start volumes=(--volume "$work/pip.conf:/etc/pip.conf:ro")
    pip_settings "$work/pip.conf" >"$work/paths"
    while read -r path; do
        volumes+=(--volume "$path:$path:ro")
    done <"$work/paths"
    say "Building $image"
    start=$(date +%s.%N)
    # chroot isolation: needs no cgroups and no new namespaces, so it works inside most containers too.
    buildah bud --layers --isolation chroot --format docker --pull=never --tag "$image" \
        --build-arg PYTHON_IMAGE="$base" --build-arg TORCH_INDEX_URL="${TORCH_INDEX_URL:-}" "${volumes[@]}" \
        "$root" >"$work/build.log" 2>&1 || {
        tail -n 60 "$work/build.log" >&2
        fail "the build"
    }
    echo "built in $(seconds_since "$start") s"
}

wait_until_ready() {
    local start=$SECONDS
    while ((SECONDS - start < 180)); do # much, as other work may have taken the CPU
        if curl --silent --fail --output /dev/null --max-time 2 "$url/ready"; then
            echo "ready $((SECONDS - start)) s after start"
            return
        fi
        [[ $(podman inspect --format '{{.State.Running}}' "$name") == true ]] || fail "the server ended during start"
        sleep 0.25
    done
    fail "not ready after 180 s"
}

# stop LIMIT: what `docker stop` does: STOPSIGNAL, and SIGKILL (then the exit code is 137) to what still runs after 10 s.
stop() {
    local start seconds code
    start=$(date +%s.%N)
    podman stop --time 10 "$name" >/dev/null
    seconds=$(seconds_since "$start")
    code=$(podman inspect --format '{{.State.ExitCode}}' "$name")
    echo "exit code $code, $seconds s after SIGTERM"
    [[ $code == 0 ]] || fail "exit code $code after SIGTERM"
    awk -v s="$seconds" -v limit="$1" 'BEGIN { exit !(s <= limit) }' || fail "took more than $1 s to end"
}

generate() { # generate FILE JSON
    curl --silent --show-error --fail-with-body --no-buffer --max-time 120 --output "$1" \
        --header 'Content-Type: application/json' --data "$2" "$url/generate"
}

# Prints the text of a stream of server-sent events; fails unless it began, brought text and ended in good order.
text_of() {
    python3 - "$1" <<'PYTHON'
import json, sys

data = [line[6:] for line in open(sys.argv[1]).read().splitlines() if line.startswith("data: ")]
if data[-1:] != ["[DONE]"]:
    sys.exit(f"the stream did not end with [DONE]: {data[-1:]}")
events = [json.loads(item) for item in data[:-1]]
tokens = [event for event in events if event["type"] == "token"]
ends = [event for event in events if event["type"] == "end"]
if events[0]["type"] != "start" or not tokens or len(ends) != 1:
    sys.exit(f"not start, tokens, one end: {[event['type'] for event in events]}")
print("".join(token["text"] for token in tokens))
print(f"({len(tokens)} token frames, finish_reason {ends[0]['finish_reason']})")
PYTHON
}

# Runs in mount and network namespaces of its own: port 8000 is free there, and nothing outside can be reached, so this
# also shows that the server needs no network.
check() {
    local user process stream
    ip link set lo up
    # crun refuses hosts that have both kinds of cgroups; no cgroups are used here, so hide the second kind from it.
    ! mountpoint --quiet /sys/fs/cgroup/unified || umount /sys/fs/cgroup/unified
    trap finish_check EXIT

    say "Starting it: read-only, no capabilities, no network beyond this machine"
    podman run --detach --name "$name" --runtime crun --network host --cgroups disabled --log-driver k8s-file \
        --ulimit nofile=1024:1024 --ulimit nproc=1024:1024 \
        --read-only --read-only-tmpfs=false --tmpfs /tmp --cap-drop all --security-opt no-new-privileges \
        "$image" >/dev/null
    wait_until_ready

    user=$(podman exec "$name" python3 -c 'import os; print(os.getuid(), os.getgid())')
    process=$(podman exec "$name" python3 -c 'print(open("/proc/1/cmdline").read().replace("\0", " ").strip())')
    echo "user and group: $user; process 1: $process"
    [[ $user == "10001 10001" ]] || fail "runs as $user"
    [[ $process == *python3*/tokenteller\ serve ]] || fail "process 1 is not the server"
    podman healthcheck run "$name" || fail "HEALTHCHECK"
    echo "HEALTHCHECK: healthy"

    say "POST /generate"
    generate "$work/stream" '{"prompt": "Once upon a time", "max_tokens": 48, "temperature": 0}'
    text_of "$work/stream"

    say "SIGTERM while a stream runs"
    generate "$work/stream" '{"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": true, "seed": 1}' &
    stream=$!
    until grep -q '"token"' "$work/stream" 2>/dev/null; do
        kill -0 "$stream" 2>/dev/null || break
        sleep 0.05
    done
    stop 10
    wait "$stream" || fail "SIGTERM cut the stream"
    text_of "$work/stream" | tail -n 1

    say "SIGTERM when idle"
    podman start "$name" >/dev/null
    wait_until_ready
    stop 5
}

finish_check() {
    local code=$?
    ((code == 0)) || podman logs --tail 40 "$name" >&2 || true
    podman rm --force --volumes --time 0 "$name" >/dev/null 2>&1 || true
    exit "$code"
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
"")
    ((EUID == 0)) || fail "must be root (mmdebstrap, namespaces)"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    install_tools
    make_base
    build
    unshare --mount --net -- "$0" check "$work"
    say "Image size: $(podman image inspect --format '{{.Size}}' "$image" | awk '{ printf "%.0f MB", $1 / 1e6 }')"
    echo "All checks passed."
    ;;
check)
    work=$2
    check
    ;;
clean)
    buildah rmi --force "$image" "$base" 2>/dev/null || true
    buildah rmi --prune --force
    ;;
*)
    fail "usage: $0 [clean]"
    ;;
esac
