# shellcheck shell=bash disable=SC2154,SC2086 # build_script() sets the variables; a stat is split into words
say() { [ -p "$events" ] && printf '%s\n' "$*" 1<>"$events"; } 2>/dev/null
uptime_cs() { read -r up rest < /proc/uptime && up=$((10#${up%.*}${up#*.})); }
# lxcfs gives a container an uptime of its own, which may go back, or away: so only differences count, if they can be.
measure() { uptime_cs; took=$((up - begin)); [ "$took" -ge 0 ] || took=0; }
fail() { say fail "$id" "$attempt" "$@"; printf '%s\n' "$*" >&7; exit 0; }
# The locks on the GPUs' lease files keep other users' services off.  The service holds them until this script does.
# It has them in `leases`; or from screen, which passes no descriptor on, it shares them.  Anybody may write the folder:
# so the files are opened by the descriptors of the service, and must name it.
hold_leases() {
  local number file owner
  for number in "${!lease_files[@]}"; do
    { exec {file}<"${lease_handles[number]}"; } 2>/dev/null && leases+=("$file") && flock -s -n "$file" &&
      [ "${lease_files[number]}" -ef "/proc/$$/fd/$file" ] && read -r owner _ <&"$file" &&
      [ "$owner" = "$service_id" ] || return 1
  done
}
release_leases() {
  local file
  for file in "${leases[@]}"; do exec {file}<&-; done
  leases=()
}
# An orphan would be taken for what the command left.  SIGKILL: a shell that was just forked may lose another signal.
end_viewer() { [ -z "$viewer" ] || { kill -9 "$viewer"; wait "$viewer"; } 2>/dev/null; }
# Whether processes of this session are left, beside this script and its children.  After a short command only the pids
# above $first, the last one before it, are looked at: so the other processes of the machine cost nothing.  (The last
# pid in /proc/loadavg may be of another PID namespace.)  A zombie with more than one thread works on.
has_company() {
  local pid stat last=0
  read -r last < /proc/sys/kernel/ns_last_pid
  if ((took < 1000 && first > 0 && last >= first && last - first < 1000)); then
    for ((pid = first + 1; pid <= last; pid++)); do
      [ -e "/proc/$pid/stat" ] || continue
      stat='' && read -r -d '' stat < "/proc/$pid/stat"
      set -- ${stat##*) }                 # its state, parent, process group, session, ..., number of threads
      [ "${4-}" != $$ ] || [ "$2" = $$ ] || [[ $1 = [ZX] && ${18} -lt 2 ]] || return 0
    done
    return 1
  fi
  # cat goes on where a process ends while its file is read; sed would stop there.
  cat /proc/[0-9]*/stat </dev/null 2>/dev/null |
    sed -n "/) [ZX]\( [-0-9]*\)\{16\} [01] /d; s/^\([0-9]*\) .*) . \([0-9]*\) [0-9]* $$ .*/ \1 \2 /p" | grep -qv " $$ "
}
# The job may have put anything in the place of a file: that goes.  A folder gets another name, as by put_aside().
make_way() {
  local number=1
  [ ! -e "$1" ] && [ ! -L "$1" ] || rm -f "$1" || {
    while [ -e "$1.old-$number" ] || [ -L "$1.old-$number" ]; do number=$((number + 1)); done
    mv -T "$1" "$1.old-$number"
  }
}
# Write how it ended: code $1, after $took, for $cause and $words; $goes_on if others of its session do.  A full disk
# loses nothing: retry until there is room, and say that there was none.
finish() {
  local fault="$dir/fault-$attempt" result="$dir/result-$attempt.json"
  until [ -L "$dir" ] || {
      { [ -z "$cause" ] || { make_way "$fault" && printf '%s\n' "$words" > "$fault"; }; } && make_way "$result" &&
      printf '{"exit_code": %s, "runtime_seconds": %s.%02d, "key": "%s"%s}\n' \
        "$1" $((took / 100)) $((took % 100)) "$key" \
        "${cause:+, \"cause\": \"$cause\"}${goes_on:+, \"goes_on\": true}${is_cut:+, \"is_cut\": true}" \
        > "$result" &&
      { [ -d "/proc/$recorder" ] || sync "$result"; }; }      # a running service records the end itself
  do
    is_cut=yes
    sleep 2
    [ -d "$dir" ] || break
    [ -L "$dir" ] || chmod u+rwx "$dir"   # the job may have taken these rights
    say end "$id" "$attempt" "$1" "$took" 1
  done 2>/dev/null
}
# The command does not run: $1 is the cause, `launch` or `bounce`, and the rest tells why.
refuse() {
  cause=$1 took=0 words=${*:2}
  release_leases
  if [ "$cause" = bounce ]; then say bounce "$id" "$attempt" "$words"
  elif [ ! -L "$dir" ]; then
    { [ -f "$dir/stderr.log" ] && [ ! -L "$dir/stderr.log" ]; } || make_way "$dir/stderr.log"
    printf 'nexus: %s\n' "$words" >> "$dir/stderr.log"
  fi
  [ -z "$is_new" ] || rm -rf "$top"
  finish null
  end_viewer
  exit 0
}

if [ -z "$attempt" ]; then                # by hand
  [ -z "$commit" ] || {
    printf 'nexus: the job ran in a checkout that is gone; make another: git -C %s worktree add DIR %s\n' \
      "$repo" "$commit" >&2
    exit 1
  }
  cd "$cwd" && exec 5>&2 6>&1 7>&2 && command_of_the_job exec
  exit
fi

# Of a command that a signal ended, bash says the whole text, with its variables: this shell's own words are for nobody.
exec 7>&2 2>/dev/null
trap : HUP                                # it outlives screen; the command does not inherit this
trap : INT QUIT TERM                      # Ctrl-C, or `kill 0`, ends the command, not this script
viewer='' cause='' is_new='' goes_on='' is_cut=''

# The claim: whoever makes this file has the attempt, this script or a service that found no runner.  As long as it is
# empty, the service waits for whoever may be about to write it.
read -r stat < /proc/$$/stat
set -- ${stat##*) }
started=${20}
uptime_cs; began=$((started - up))        # the start times of processes may have another clock than the uptime
set -C                                    # an open does not succeed where there is a file
exec 8>"$dir/attempt-$attempt" || {
  [ -e "$dir/attempt-$attempt" ] || fail "the log folder $dir cannot be written"
  exit 0
}
set +C
printf '%s\n' "$$ $started $key" >&8 || fail "the log folder $dir cannot be written"
exec 8>&-
read -r owner < "$dir/attempt-$attempt"
[ "$owner" = "$$ $started $key" ] || exit 0    # somebody removed it, and it was made again
hold_leases || refuse bounce a GPU lease was lost before its job began

# From here on the job counts as begun.
uptime_cs; began=$((began + up))
printf '%s\n' "$began" >> "$dir/attempt-$attempt" || fail "the log folder $dir cannot be written"
say start "$id" "$attempt" "$$" "$started" "$began"
if [ "$commit" ]; then
  cd -P "$dir" && top=$PWD/files
  { [ -d "$top" ] && [ ! -L "$top" ]; } || is_new=yes      # an earlier attempt's stays, with what that has written
  said=$(check_out 2>&1) || {
    [ $? -le 128 ] || said="git was ended by a signal"
    refuse launch "the snapshot of $repo cannot be checked out: $said"
  }
fi
cd "$cwd" 2>/dev/null || refuse launch "the directory $cwd cannot be entered; make it again, or add the job with --cwd"
PATH=$job_path type -P bash > /dev/null || refuse launch "bash was not found on PATH, as $dir/job.sh sets it"
exec 5>>"$dir/stderr.log" 6>>"$dir/stdout.log" || refuse launch "the log files in $dir cannot be written"
if [ -t 1 ]; then                         # under screen, its window shows the logs
  (
    release_leases
    NEXUS_ROLE=viewer exec tail -qn 100 -s 0.2 -f --pid=$$ "$dir/stdout.log" "$dir/stderr.log"
  ) </dev/null 5>&- 6>&- 7>&- &
  viewer=$!
fi

uptime_cs; begin=$up
read -r first < /proc/sys/kernel/ns_last_pid || first=0
command_of_the_job
code=$?

trap '' HUP INT QUIT TERM USR1 USR2       # a stop's signals are not for what this script itself runs from here on
umask 077
exec 5>&- 6>&-
# From CONDA_SCRIPT; after a signal, the environment is not at fault.
if [ "$conda" ] && [ -f "$dir/fault-$attempt" ] && [ ! -L "$dir/fault-$attempt" ]; then
  read -r -d '' -n 2000 words < "$dir/fault-$attempt"
  rm -f "$dir/fault-$attempt"
  [ "$code" -gt 128 ] || refuse launch "${words%$'\n'}"
fi
measure
release_leases
[ -z "$commit" ] || has_company || tidy   # before the end is said: the next attempt uses the same checkout
say end "$id" "$attempt" "$code" "$took"
# While others of its session work, the job goes on; the service ends those that idle.  This script stays with them: the
# end of a session's leader hangs up its terminal.  Slurm ends with a job what it left.
[ "${SLURM_JOB_ID-}" ] || ! has_company || goes_on=yes
finish "$code"
if [ "$goes_on" ]; then
  while sleep 1; measure; has_company; do :; done
  goes_on=
  finish "$code"
  say end "$id" "$attempt" "$code" "$took"
fi
[ -z "$commit" ] || tidy
end_viewer
