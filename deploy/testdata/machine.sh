#!/bin/sh
# Boots systemd as the first process of a machine that has a copy of this one's files,
# in a directory. What it writes there is gone with it, except for the home of root.
#
#   machine.sh DIRECTORY HOSTNAME HOSTS HOME
set -eu
dir=$1
hostname "$2"
mount --make-rprivate /
mount -t tmpfs tmpfs "$dir"
mkdir "$dir/upper" "$dir/work" "$dir/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$dir/upper,workdir=$dir/work" "$dir/root"
cp "$3" "$dir/root/etc/hosts"
cd "$dir/root"
mount --rbind /dev dev
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
# No services of the machine that we are a copy of; only what a unit stands on.
rm -rf lib/systemd/system/sysinit.target.wants lib/systemd/system/basic.target.wants
rm -rf etc/systemd/system
mkdir -p etc/systemd/system run/systemd/system
mount --bind "$4" root
: >etc/fstab
: >etc/machine-id
echo "$2" >etc/hostname
cat >run/systemd/system/boot.target <<END
[Unit]
Requires=basic.target systemd-journald.service
After=basic.target systemd-journald.service
END
mkdir -p run/systemd/old
pivot_root . run/systemd/old
umount -l /run/systemd/old
export container=test PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
exec /lib/systemd/systemd --system --unit=boot.target --log-target=console --log-level=info --show-status=no </dev/null
