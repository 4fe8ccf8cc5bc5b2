#!/bin/sh
# PID 1 of the guest, out of the initramfs: the host's root, read-only over 9p under a tmpfs, becomes the root.
set -e
bb=/bin/busybox
$bb mount -t proc proc /proc
$bb mount -t sysfs sys /sys
$bb mount -t devtmpfs dev /dev
for module in virtio_pci 9pnet_virtio 9p overlay; do $bb modprobe $module; done
$bb mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose root /host
$bb mount -t tmpfs -o size=75% upper /upper
$bb mkdir /upper/up /upper/work
$bb mount -t overlay -o lowerdir=/host,upperdir=/upper/up,workdir=/upper/work overlay /new
# The host may have no /lib/modules and no modprobe: the guest's own go over them.
$bb mkdir -p /new/lib/modules
$bb cp -a /lib/modules/* /new/lib/modules/
$bb cp /bin/busybox /new/sbin/busybox.guest
$bb ln -sf busybox.guest /new/sbin/modprobe
for part in proc sys dev; do $bb mount --move /$part /new/$part; done
$bb mkdir -p /new/mnt/guest
$bb mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 run /new/mnt/guest
exec $bb switch_root /new /bin/bash /mnt/guest/inside.sh
