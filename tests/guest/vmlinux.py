"""The plain ELF kernel out of a bzImage: qemu starts it by its PVH entry, so no xz is unpacked in emulation.

The fields are those of the kernel's boot protocol (Documentation/arch/x86/boot.rst): the sectors of the setup
code at 0x1f1, the payload's offset behind them at 0x248 and its length at 0x24c.
"""

import lzma
import struct
import sys
from pathlib import Path


def unpack(image: bytes) -> bytes:
    """The ELF file that ``image`` carries; ValueError where the image isn't what this can unpack."""
    if image[0x202:0x206] != b"HdrS":
        raise ValueError("not a bzImage")
    sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    begin = (sectors + 1) * 512 + offset
    payload = image[begin : begin + length]
    if not payload.startswith(b"\xfd7zXZ\x00"):
        raise ValueError("the kernel isn't packed with xz, as Debian's are: teach vmlinux.py its packing")
    kernel = lzma.LZMADecompressor().decompress(payload)
    if not kernel.startswith(b"\x7fELF"):
        raise ValueError("what the image carries isn't an ELF file")
    return kernel


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(unpack(Path(sys.argv[1]).read_bytes()))
