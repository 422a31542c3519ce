# shellcheck shell=bash
  unpack=()
  for python in @PYTHON@ /usr/bin/python3; do
    [ ! -x "$python" ] || { unpack=("$python" -I -S -c @PROGRAM@); break; }
  done
  [ "${#unpack[@]}" -gt 0 ] || echo "nexus: without Python these variables are not set:" @NAMES@ >&5
