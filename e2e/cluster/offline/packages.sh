#!/bin/bash
# packages.sh NAME...: install Debian packages without starting the services that they bring.
. "$(dirname "$0")/../lib.sh"
[ "$(id -u)" = 0 ] || die "must be root to install: $*"
export DEBIAN_FRONTEND=noninteractive
exec 9>"$RUN/packages.lock"
flock 9 # what is built side by side may want packages at the same time
deny=/usr/sbin/policy-rc.d
if [ ! -e $deny ]; then
  printf '#!/bin/sh\nexit 101\n' >$deny
  chmod 755 $deny
  trap 'rm -f $deny' EXIT
fi
apt-get install -y -qq --no-install-recommends "$@" || { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@"; }
