#!/bin/sh
# Reports in one line what is missing for `make setup`. Usage: check_machine.sh PYTHON
python=$1

fail() {
  echo "make setup: $1" >&2
  exit 1
}

command -v "$python" >/dev/null ||
  fail "'$python' not found: install Python 3.10 to 3.13, or name one with PYTHON=..."
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
  fail "$("$python" --version) is not supported: name a Python 3.10 to 3.13 with PYTHON=..."
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  fail "'$python' cannot make virtual environments: install its venv module (Debian: python3-venv)"
command -v cmake >/dev/null || fail "'cmake' not found: install cmake 3.16 or newer"
command -v g++ >/dev/null || fail "'g++' not found: install a C++ compiler (Debian: g++)"
[ "$(uname -sm)" = 'Linux x86_64' ] ||
  fail "the ROS wheels are for Linux x86_64, this is $(uname -sm): use a ROS 2 distribution and colcon"
