# shellcheck shell=bash disable=SC2154 # build_script() sets $kept
hide_environment() {
  local pair
  export -n PWD OLDPWD SHLVL
  while IFS= read -r -d '' pair; do
    [[ ${pair%%=*} =~ ^($kept)$ ]] || export -n "${pair%%=*}"
  done < "/proc/$$/environ"
} 2>/dev/null
