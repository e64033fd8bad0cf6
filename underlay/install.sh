#!/bin/sh
# Adds ROS packages that are not on PyPI to a virtual environment with ROS wheels.
# Usage: install.sh VENV
set -eu

here=$(cd "$(dirname "$0")" && pwd)
venv=$(cd "$1" && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

# CMake uses the first python3 in PATH.
export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"

run() {
  "$@" >"$build/log" 2>&1 || {
    cat "$build/log" >&2
    echo "underlay: '$*' failed, see its output above" >&2
    exit 1
  }
}
run cmake -S "$here/tf2_msgs" -B "$build/tf2_msgs" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_PREFIX_PATH="$venv" -DCMAKE_INSTALL_PREFIX="$venv"
run cmake --build "$build/tf2_msgs" --target install

# The second line lets ament_index_python find share/ without a sourced setup file.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cat >"$site/lingbot_map_underlay.pth" <<EOF
$here/python
import os, sys; os.environ.setdefault('AMENT_PREFIX_PATH', sys.prefix)
EOF
