function __nexus_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l found (nexus complete $words[2..-1] 2>/dev/null)
    test (count $found) -gt 0; and printf "%s\n" $found; or __fish_complete_path $words[-1]
end
complete -c nexus -f -a '(__nexus_complete)'
