# shellcheck shell=bash disable=SC2154,SC2086 # build_script() sets the variables; git_options is several words
git_in() (
  hide_environment
  export PATH="$job_path" HOME="$home" LC_ALL=C GIT_TERMINAL_PROMPT=0 GIT_OPTIONAL_LOCKS=0
  exec git $git_options -C "$@"
)
make_git() {                              # the git folder $1, with nothing of the job's in it
  local common
  common=$(git_in "$repo" rev-parse --git-common-dir </dev/null) || return
  case $common in /*) ;; *) common=$repo/$common;; esac
  rm -rf "$1" && mkdir "$1" && printf '%s\n' "$common" > "$1/commondir" && printf '%s\n' "$commit" > "$1/HEAD"
}
check_out() {
  local blocked=()
  umask "$umask"
  [ -z "$is_new" ] || make_way "$top" && mkdir -p "$top" && cd "$top" && rm -rf .git.nexus && make_git .git &&
    git_in . read-tree --reset HEAD </dev/null || return
  # What an earlier attempt has put in the place of a folder stays, without the files that git has below that.  git
  # itself does not see FIFOs.
  [ "$is_new" ] ||
    mapfile -d '' -t blocked < <(git_in . ls-files -z --killed </dev/null; find . ! -type f ! -type d ! -type l -print0)
  blocked=("${blocked[@]#./}")
  git_in . ls-files -z --deleted -- . "${blocked[@]/#/:(exclude,literal)}" </dev/null |
    git_in . checkout-index -zu --stdin && { [ -d "$cwd" ] || make_cwd; }
}
make_cwd() (                              # an ignored folder, or an empty one
  rest=${cwd#"$tree"}
  while rest=${rest#/} name=${rest%%/*}; [ "$rest" ]; do
    if [ -L "./$name" ]; then printf '%s\n' "$cwd is missing, and the job has put a link above it"; exit 1; fi
    { [ -d "./$name" ] || mkdir "./$name"; } && cd "./$name" || exit
    rest=${rest#"$name"}
  done
)
# Files that the job has written into its checkout stay there; those from git, and compiled Python, go.  The job's own
# changes to HEAD and index do not count.  Where git cannot tell them apart, all files are kept.  git removes no file
# through a link.  git-lfs keeps what it is asked about: not in the repository.
git_here() { git_in . -c lfs.storage="$top/.git.nexus/lfs" --git-dir=.git.nexus --work-tree=. "$@"; }
tidy() (
  cd -P "$tree" && [ "$PWD" = "$top" ] && [ -d .git ] && [ ! -L .git ] && [ -f .git/index ] && [ ! -L .git/index ] &&
    make_git .git.nexus && mv .git/index .git.nexus/index || exit
  git_here read-tree --reset "$commit" && {
    git_here update-index -q --refresh --ignore-submodules
    git_here diff-files -z --name-only --ignore-submodules | git_here update-index -z --force-remove --stdin
  } && git_here read-tree -m -u "$(git_here hash-object -t tree /dev/null)" && rm -rf .git
  rm -rf .git.nexus
  find . -name __pycache__ -type d -prune -exec rm -rf {} +
  find . -depth -mindepth 1 -type d -empty -delete
  rmdir "$top"
) 2>/dev/null
