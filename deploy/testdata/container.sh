#!/bin/sh
# Runs a program as a container engine does: a root directory of its own, read-only
# but for what is mounted into it, another user, an environment of its own.
#
#   container.sh ROOT HOSTNAME USER [SOURCE:TARGET]... -- [NAME=VALUE]... -- PROGRAM...
set -eu
root=$1 user=$3
mount --make-rprivate /
hostname "$2"
shift 3
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
while [ "$1" != -- ]; do
  mount --bind "${1%%:*}" "$root${1#*:}"
  shift
done
shift
mount -t proc proc "$root/proc"
# The environment is put before the program that changes root, by moving it to the end.
count=0
for word; do
  [ "$word" != -- ] || break
  count=$((count + 1))
done
i=0
set -- "$@" env -i
while [ $i -lt $count ]; do
  set -- "$@" "$1"
  shift
  i=$((i + 1))
done
shift # --
set -- "$@" "$(command -v chroot)" --userspec="$user" --groups= "$root"
while [ "$1" != env ]; do
  set -- "$@" "$1"
  shift
done
exec setpriv --no-new-privs "$@"
