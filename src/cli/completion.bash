_nexus() { local IFS=$'\n'; COMPREPLY=($(nexus complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)); }
complete -o default -F _nexus nexus
