# shellcheck shell=sh
name=$1 test=$2; shift 2
for folder do
  printf '%s\0' "$folder"
  test "$test" "${folder:-.}/$name" && [ ! -d "${folder:-.}/$name" ] && printf '%s\0' "${folder:-.}/$name" && exit
done
exit 1
