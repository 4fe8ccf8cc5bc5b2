#!/usr/bin/env bash
# What a guest needs, brought together once in build/guest: Debian's kernel (unpacked, not installed) as a plain ELF
# file, and an initramfs of busybox and the modules named in modules.txt. Exit status 75: this machine can't have them.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
store=$root/build/guest
packages="qemu-system-x86 busybox-static cpio dmsetup iproute2 e2fsprogs
          python3-pyverbs ibverbs-utils ibverbs-providers rdma-core"
sudo=; test "$(id -u)" = 0 || sudo=sudo

cannot() { echo "skipped: no guest for RDMA and block devices here: $1" >&2; exit 75; }

mkdir -p "$store"
exec 8>"$store/lock"
flock 8

stamp=$(cat "$here"/{prepare.sh,modules.txt,init.sh,vmlinux.py} | sha256sum | cut -d' ' -f1)
test "$(cat "$store/stamp" 2>/dev/null)" = "$stamp" && exit 0
rm -f "$store/stamp"

test "$(uname -m)" = x86_64 || cannot "the recipe is for x86_64, this is $(uname -m)"
command -v apt-get >/dev/null || cannot "there is no apt-get to install qemu and a kernel with"
log=$store/prepare.log
missing=$(for name in $packages; do dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null | grep -qx installed || echo "$name"; done)
if [ -n "$missing" ]; then
  echo "installing from apt:" $missing
  { $sudo apt-get -qq update && $sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $missing; } \
    >"$log" 2>&1 || cannot "apt-get couldn't install $(echo $missing) ($log)"
fi

work=$(mktemp -d "$store/unpack.XXXXXX")
trap 'rm -rf "$work"' EXIT
image=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '$1=="Depends:"{print $2; exit}')
test -n "$image" || cannot "apt knows no linux-image-amd64"
echo "unpacking the kernel of $image"
(cd "$work" && apt-get download "$image" >"$log" 2>&1) || cannot "apt-get couldn't download $image ($log)"
dpkg-deb -x "$work"/linux-image-*.deb "$work/deb"
version=$(basename "$work"/deb/lib/modules/*)
python3 "$here/vmlinux.py" "$work/deb/boot/vmlinuz-$version" "$store/vmlinux.new"

# Only the modules that guests use, with what they need: under emulation a short modules.dep is read much faster.
modules=$work/deb/lib/modules/$version
tree=$work/initramfs
busybox depmod -b "$work/deb" "$version"
sed 's/#.*//' "$here/modules.txt" | tr -s ' \n' '\n' | sed '/^$/d' >"$work/wanted"
while read -r name; do
  line=$(grep -E "/${name}\.ko:" "$modules/modules.dep") || {
    grep -qE "/${name}\.ko$" "$modules/modules.builtin" && continue
    echo "tests/guest/modules.txt names $name, which $image doesn't have" >&2; exit 1; }
  for file in ${line//:/}; do
    install -D -m 644 "$modules/$file" "$tree/lib/modules/$version/$file"
  done
done <"$work/wanted"
cp "$modules"/modules.{order,builtin} "$tree/lib/modules/$version/"
busybox depmod -b "$tree" "$version"

mkdir -p "$tree"/{bin,sbin,proc,sys,dev,host,upper,new}
cp "$(command -v busybox)" "$tree/bin/busybox"
ln -s /bin/busybox "$tree/bin/sh"
ln -s /bin/busybox "$tree/sbin/modprobe"
install -m 755 "$here/init.sh" "$tree/init"
(cd "$tree" && find . | cpio --quiet -o -H newc -R 0:0 >"$store/initramfs.new")
mv "$store/vmlinux.new" "$store/vmlinux"
mv "$store/initramfs.new" "$store/initramfs"
echo "$stamp" >"$store/stamp"
