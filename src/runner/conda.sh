# shellcheck shell=bash
# Activate the conda environment $1, a name or a path, and exec the command in the other words.
# conda, mamba and micromamba print what a shell must evaluate for it.  `conda run` would hold the output back.  All
# names begin with nexus_, so that they do not meet those of the job's environment or of an activation script.
nexus_name=$1 nexus_fault=$NEXUS_JOB_FAULT
nexus_order=${CUDA_DEVICE_ORDER+=$CUDA_DEVICE_ORDER} nexus_devices=${CUDA_VISIBLE_DEVICES+=$CUDA_VISIBLE_DEVICES}
unset NEXUS_JOB_FAULT
nexus_known=(~/{miniconda3,miniforge3,mambaforge,anaconda3}/bin/conda ~/.local/bin/micromamba ~/bin/micromamba
             /opt/{conda,miniconda3,miniforge3,anaconda3}/bin/conda)

# Tell job.sh, or the person who runs it by hand, why the command does not run.
nexus_fail() {
  trap - EXIT
  nexus_words=${1//[[:cntrl:]]/?}         # not `local`: after `set -e`, the trap runs outside any function
  { [ "$nexus_fault" ] && printf '%s\n' "$nexus_words" > "$nexus_fault"; } || printf 'nexus: %s\n' "$nexus_words" >&2
  exit 1
}
nexus_explain() {
  "$nexus_exe" env list </dev/null >&2
  nexus_fail "the conda environment '$nexus_name' was not found, or could not be activated, by ${nexus_exe##*/}:\
 stderr.log says why, and which there are"
}

for nexus_exe in "$CONDA_EXE" "$MAMBA_EXE" "$(type -P conda)" "$(type -P mamba)" "$(type -P micromamba)" \
    "${nexus_known[@]}" ''; do
  [ -f "$nexus_exe" ] && [ -x "$nexus_exe" ] && break
done
[ "$nexus_exe" ] || nexus_fail "no conda was found for the environment '$nexus_name': not by CONDA_EXE or MAMBA_EXE,\
 not as conda, mamba or micromamba on PATH, and none of {~,/opt}/{miniconda3,miniforge3,mambaforge,anaconda3},\
 /opt/conda, {~,~/.local}/bin/micromamba is there"
case ${nexus_exe##*/} in
  *mamba*) nexus_text=$("$nexus_exe" shell activate "$nexus_name" --shell bash </dev/null);;
  *) nexus_text=$("$nexus_exe" shell.posix activate "$nexus_name" </dev/null);;
esac || nexus_explain
eval "nexus_activate() { $nexus_text
}" 2>/dev/null || nexus_explain            # bash would quote what it cannot parse, and PATH stands in it
trap "nexus_fail \"a script of the conda environment '\$nexus_name' ended the activation with exit code \$?\"" EXIT
nexus_activate </dev/null >&2
trap - EXIT
[ -d "$CONDA_PREFIX" ] || nexus_explain   # old micromambas activate whatever they are told
if [ "${VIRTUAL_ENV-}" ]; then             # active where the job was added; its python would come first on PATH
  PATH=$CONDA_PREFIX/bin:$PATH
  unset VIRTUAL_ENV VIRTUAL_ENV_PROMPT
fi
[ -z "$nexus_order" ] || export "CUDA_DEVICE_ORDER$nexus_order"          # whatever a script of the environment says
[ -z "$nexus_devices" ] || export "CUDA_VISIBLE_DEVICES$nexus_devices"
exec "${@:2}"
