#!/usr/bin/env bash
# Installs Chromium, in which the tests of `treadle view` open the page; without it they are skipped.
# Does nothing if there is one.  For Debian and its relatives, as root or with sudo.
set -euo pipefail

for name in chromium chromium-browser google-chrome chrome; do
  if command -v "$name" >/dev/null; then
    echo "$name is installed"
    exit 0
  fi
done
if ! command -v apt-get >/dev/null; then
  echo "error: no apt-get here: install Chromium with this system's packages" >&2
  exit 1
fi
as_root=()
if ((EUID != 0)); then
  if ! sudo -n true 2>/dev/null; then
    echo "error: not root, and sudo asks for a password: run \`sudo $0\`" >&2
    exit 1
  fi
  as_root=(sudo -n)
fi
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium
