# shellcheck shell=sh
test=$1 left=$2; shift 2
set -f
IFS=/
for folder do
  printf '>%s\0' "$folder"
  names=$left left=
  for name in $names; do
    place=${folder:-.}/$name
    if test "$test" "$place" && [ ! -d "$place" ]; then printf '=%s\0' "$place"; else left=$left${left:+/}$name; fi
  done
  [ "$left" ] || exit
done
