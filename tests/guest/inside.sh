#!/bin/bash
# PID 1 of the guest once the host's root is its root: brings devices and networks up, runs the one command it was
# booted for and says its exit status on the console, after the word that only this boot knows.
here=/mnt/guest
role=$(sed 's/.*guest=\([12]\).*/\1/' /proc/cmdline)
. "$here/job$role.env"                 # WORD, FOLDER
status=125
finish() {
  sync
  echo "guest-exit $WORD $status" >/dev/ttyS0
  /sbin/busybox.guest poweroff -f
  sleep 60
}
trap finish EXIT

export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 FFS_GUEST=1
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs run /run
ln -sf /proc/self/fd /dev/fd
ln -sf /proc/self/fd/0 /dev/stdin
ln -sf /proc/self/fd/1 /dev/stdout
ln -sf /proc/self/fd/2 /dev/stderr
hostname "guest$role"
ulimit -l unlimited -n 65536
ip link set lo up

rdma_up() {   # software RDMA over a dummy link: loopback between two queue pairs of this guest
  modprobe -a ib_uverbs rdma_rxe rdma_ucm dummy
  ip link add dummy0 type dummy 2>/dev/null
  ip address add 10.99.0.1/24 dev dummy0
  ip link set dummy0 mtu 9000 up
  rdma link add rxe0 type rxe netdev dummy0
}
scratch_up() {   # an ext4 for files that want a device below them; the root is a tmpfs
  for _ in $(seq 100); do test -b /dev/disk-scratch && break; name_disks; sleep 0.05; done
  mkdir -p /scratch
  mount -t ext4 -o noatime /dev/disk-scratch /scratch
}
name_disks() {   # by the serial numbers that run.py gave: the kernel's order may be any
  for disk in /sys/block/nvme*n1; do
    test -e "$disk" || continue
    serial=$(cat "$disk/device/serial")
    ln -sf "/dev/${disk##*/}" "/dev/disk-${serial// /}"
  done
}
cable_up() {   # to the other guest, if there is one (RDMA over it: rdma link add rxe1 type rxe netdev eth0)
  modprobe virtio_net
  test -e /sys/class/net/eth0 || return 0
  ip address add "10.98.0.$role/24" dev eth0
  ip link set eth0 mtu 9000 up
}
{ rdma_up; cable_up; } &
modprobe nvme
modprobe ext4
scratch_up &
wait
name_disks
export TMPDIR=/scratch

cd "$FOLDER" || exit
stty -F /dev/ttyS1 raw 2>/dev/null
echo "guest-up $WORD" >/dev/ttyS0
setsid bash "$here/command$role" </dev/null >/dev/ttyS1 2>&1
status=$?
