# shellcheck shell=sh
trap : HUP; trap '' INT QUIT
NEXUS_UMASK=$(umask); export NEXUS_UMASK  # for jobs without one
umask 077
hash rm sleep timeout readlink 2>/dev/null         # a folder of PATH may hang later
home=$1; shift
if [ -t 1 ]; then tail -n 100 -F --pid=$$ "$home/service.log" 2>/dev/null & fi
user=$(id -u) root=$(stat -c %u /)        # root may have another number in a container

is_safe() {                               # nobody but root and this user may change this file, or exchange it
  place=$1
  while facts=$(stat -c '%u %a' "$place"); do
    case " $user $root " in *" ${facts% *} "*) ;; *) return 1; esac
    case ${facts#* } in
      [1357]???) [ -d "$place" ] || return 1 ;;                   # sticky: others cannot exchange what is not theirs
      *[2367]?|*[2367]) return 1 ;;
    esac
    [ "$place" != / ] || return 0
    place=${place%/*} place=${place:-/}
  done
  return 1
}

can_run() { NEXUS_ROLE=check timeout 30 "$@" </dev/null >/dev/null 2>&1; }

find_python() {                           # sets python to another one that can run the service
  rest=/usr/bin:/usr/local/bin:$PATH: seen=:
  while [ "$rest" ]; do
    folder=${rest%%:*} rest=${rest#*:}
    for name in "$folder/python3" "$folder"/python3.[0-9] "$folder"/python3.[0-9][0-9]; do
      python=$(readlink -f "$name") || continue                   # what is looked at is what runs
      case $name$seen in [!/]*|*":$python:"*) continue; esac
      seen=$seen$python:
      if [ -f "$python" ] && [ -x "$python" ] && is_safe "$python" && can_run "$python" "$@"; then return; fi
    done
  done
  return 1
}

delay=1 has_run='' has_looked=''
while :; do
  rm -f "$home/start_error.json"
  read -r began rest < /proc/uptime
  log=$home/service.log
  true 2>/dev/null 3>>"$log" || log=/dev/null       # the disk may have no room for it
  "$@" </dev/null >/dev/null 2>>"$log"
  code=$?
  read -r ended rest < /proc/uptime
  ran=$((${ended%.*} - ${began%.*}))
  if [ $ran -gt 10 ]; then delay=1; fi
  if [ $ran -gt 10 ] || [ $code -gt 128 ]; then has_run=yes; export NEXUS_HAS_RUN=yes; fi
  [ $code -ne 0 ] || exit                 # it was stopped
  if [ $code -le 128 ] && [ -e "$home/start_error.json" ]; then      # it was not killed; the file is its own
    [ "$has_run" ] || exit                # the command that started it reports the fault; later it may pass
  elif [ $code -eq 4 ]; then exit; fi     # another service runs, and has a supervisor
  if [ "$has_run" ] && [ $ran -le 10 ] && [ $code -ne 137 ] && [ $code -ne 143 ] && ! can_run "$@"; then
    former=$1; shift                      # this Python was updated or removed
    if find_python "$@"; then
      export NEXUS_FORMER_PYTHON="${NEXUS_FORMER_PYTHON:-$former}"
      set -- "$python" "$@"
      continue
    fi
    set -- "$former" "$@"
    [ "$has_looked" ] || echo "neither $former nor another Python here can run the service" >>"$home/service.log"
    has_looked=yes
  fi
  sleep $delay
  [ ! -e "$home/stopped" ] || exit        # nexus stop
  [ $delay -ge 16 ] || delay=$((delay * 2))
done
