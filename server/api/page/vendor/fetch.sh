#!/usr/bin/env bash
# Fetches the page's libraries at their pinned versions and checks them against SHA256SUMS. To take a newer version:
# change it here, run with --accept, look at the difference, commit.
set -euo pipefail
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

unpack() { # package version
    (cd "$work" && npm pack --silent "$1@$2" >/dev/null && mkdir "$1" && tar xzf "$1-$2.tgz" -C "$1" --strip-components=1)
}
unpack htm 3.1.1     # its standalone form holds Preact and the hooks
unpack uplot 1.6.32
unpack preact 10.4.1 # for its licence

cp "$work/htm/preact/standalone.module.js" preact-htm.js
cp "$work/uplot/dist/uPlot.iife.min.js" uplot.js
cp "$work/uplot/dist/uPlot.min.css" uplot.css
{
    echo "preact-htm.js: htm 3.1.1 with Preact"
    printf '\n--- htm ---\n'; cat "$work/htm/LICENSE"
    printf '\n--- Preact ---\n'; cat "$work/preact/LICENSE"
    printf '\nuplot.js, uplot.css: uPlot 1.6.32\n\n--- uPlot ---\n'; cat "$work/uplot/LICENSE"
} >LICENSES.txt
[ "${1:-}" = --accept ] && sha256sum preact-htm.js uplot.js uplot.css LICENSES.txt >SHA256SUMS
sha256sum --check --quiet SHA256SUMS && echo "all as pinned"
