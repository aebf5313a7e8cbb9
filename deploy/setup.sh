#!/usr/bin/env bash
# Creates .venv and installs the locked dependencies into it. Names what is missing if it cannot.
set -euo pipefail
cd "$(dirname "$0")/.."

need() { # program, package
	command -v "$1" >/dev/null && return
	if [ "$(id -u)" = 0 ]; then
		echo "Installing $2"
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$2" >/dev/null
	else
		echo "$1 is missing. Install it: sudo apt-get install $2" >&2
		exit 3
	fi
}

python=""
for candidate in python3.11 python3.12 python3; do
	if command -v "$candidate" >/dev/null &&
		"$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
		python=$candidate
		break
	fi
done
if [ -z "$python" ]; then
	need python3.11 python3.11
	python=python3.11
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
	if [ "$(id -u)" = 0 ]; then
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null
	else
		echo "Python's venv is missing. Install it: sudo apt-get install python3-venv" >&2
		exit 3
	fi
fi

[ -x .venv/bin/python ] || "$python" -m venv .venv
echo "Installing the Python packages (about 600 MB the first time)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
touch .venv/ready
