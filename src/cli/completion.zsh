#compdef nexus
local -a found=(${(f)"$(nexus complete "${(@Q)words[2,CURRENT]}" 2>/dev/null)"})
if (( $#found )); then compadd -a found; else _files; fi
