# shellcheck shell=bash
# A pipeline that ends in tee has the exit code of what it pipes.
for nexus_code in "${PIPESTATUS[@]}" "$?"; do [ "$nexus_code" = 0 ] || nexus_last=$nexus_code; done
exit "${nexus_last:-0}"
