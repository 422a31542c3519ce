#!/bin/sh
# Made by nexus install.  It imports nexus.py rather than running it, so that its compiled form is kept.
python=@PYTHON@
if ! [ -x "$python" ]; then               # it was removed, or its virtual environment was moved
  gone=$python python='' rest=/usr/bin:/usr/local/bin:$PATH:
  while [ "$rest" ] && ! [ "$python" ]; do
    folder=${rest%%:*} rest=${rest#*:}
    for name in "$folder/python3" "$folder"/python3.[0-9] "$folder"/python3.[0-9][0-9]; do
      case $name in [!/]*) continue; esac
      if [ -x "$name" ] && "$name" -E -c @CHECK@ 2>/dev/null; then python=$name; break; fi
    done
  done
  if ! [ "$python" ]; then
    echo "nexus: $gone is gone, and no other Python here can run it" >&2
    echo "hint: with Python 3.9 or newer: python3" @FOLDER@/nexus.py install >&2
    exit 127
  fi
  ! [ -t 2 ] || echo "nexus: $gone is gone, so $python runs it: nexus install makes that the usual one" >&2
fi
exec "$python" -E -c 'import sys
sys.path[0] = sys.argv.pop(1)
import nexus
sys.exit(nexus.entry())' @FOLDER@ "$@"
