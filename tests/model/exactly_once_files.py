"""Cases of sessions and files (exactly_once.py)."""

from __future__ import annotations

from exactly_once_world import BATCH, USER, World, case

from ffs.proto import meta, xattrs

# --- sessions -------------------------------------------------------------------------------


@case(meta.SessionRenew)
async def renewal(world: World) -> meta.Request:
    return meta.SessionRenew()


@case(meta.SessionClose)
async def end_of_a_session(world: World) -> meta.Request:
    await world.file(b"/f", keep=True)
    return meta.SessionClose()


# --- files ----------------------------------------------------------------------------------


@case(meta.Open)
async def creation(world: World) -> meta.Request:
    return meta.Open(path=b"/f", flags=meta.OPEN_WRITE | meta.OPEN_CREATE | meta.OPEN_EXCL)


@case(meta.Open)
async def creation_of_what_is_there(world: World) -> meta.Request:
    await world.file(b"/f")
    return meta.Open(path=b"/f", flags=meta.OPEN_WRITE | meta.OPEN_CREATE | meta.OPEN_EXCL)


@case(meta.Open)
async def open_for_writing(world: World) -> meta.Request:
    await world.file(b"/f", 5000)
    return meta.Open(path=b"/f", flags=meta.OPEN_WRITE)


@case(meta.Open)
async def open_with_truncation(world: World) -> meta.Request:
    await world.file(b"/f", 20_000)
    return meta.Open(path=b"/f", flags=meta.OPEN_WRITE | meta.OPEN_TRUNC)


@case(meta.Open)
async def temporary_file(world: World) -> meta.Request:
    return meta.Open(path=b"/", flags=meta.OPEN_WRITE | meta.OPEN_TMPFILE)


@case(meta.OpenMany)
async def many_creations(world: World) -> meta.Request:
    await world.file(b"/m070")
    flags = meta.OPEN_READ | meta.OPEN_CREATE | meta.OPEN_EXCL
    return meta.OpenMany(entries=tuple(meta.OpenEntry(b"/m%03d" % i, flags) for i in range(BATCH)))


@case(meta.OpenMany)
async def many_truncations(world: World) -> meta.Request:
    for i in (0, 65, 66):
        await world.file(b"/m%03d" % i, 9000)
    flags = meta.OPEN_WRITE | meta.OPEN_TRUNC
    return meta.OpenMany(entries=tuple(meta.OpenEntry(b"/m%03d" % i, flags) for i in range(70)))


@case(meta.Close)
async def close_with_a_length(world: World) -> meta.Request:
    opened = await world.file(b"/f", keep=True)
    world.put(opened, 7000)
    return meta.Close(ino=opened.ino, handle=opened.handle, length=7000, written=True)


@case(meta.Close)
async def close_of_what_is_closed(world: World) -> meta.Request:
    opened = await world.file(b"/f")
    return meta.Close(ino=opened.ino, handle=opened.handle)


@case(meta.CloseMany)
async def many_closes(world: World) -> meta.Request:
    entries = []
    for i in range(BATCH):
        opened = await world.file(b"/c%d" % i, keep=True)
        handle = opened.handle if i % 50 else 99
        entries.append(meta.CloseEntry(opened.ino, handle, 0, 100 + i, True))
    return meta.CloseMany(entries=tuple(entries))


@case(meta.Fsync)
async def published_length(world: World) -> meta.Request:
    opened = await world.file(b"/f", keep=True)
    world.put(opened, 7000)
    return meta.Fsync(ino=opened.ino, handle=opened.handle, length=7000)


@case(meta.Fsync)
async def length_without_a_session(world: World) -> meta.Request:
    opened = await world.file(b"/f")
    return meta.Fsync(ino=opened.ino, handle=opened.handle, length=7000)


@case(meta.Append)
async def reservation(world: World) -> meta.Request:
    opened = await world.file(b"/f", 100, flags=meta.OPEN_APPEND, keep=True)
    return meta.Append(ino=opened.ino, handle=opened.handle, length=50)


@case(meta.Append)
async def reservation_without_a_session(world: World) -> meta.Request:
    opened = await world.file(b"/f")
    return meta.Append(ino=opened.ino, handle=opened.handle, length=50)


@case(meta.Truncate)
async def shortening(world: World) -> meta.Request:
    await world.file(b"/f", 20_000)
    return meta.Truncate(path=b"/f", length=5000)


@case(meta.Truncate)
async def shortening_by_a_writer(world: World) -> meta.Request:
    opened = await world.file(b"/f", 20_000, keep=True)
    return meta.Truncate(ino=opened.ino, handle=opened.handle, length=4096)


@case(meta.Truncate)
async def lengthening(world: World) -> meta.Request:
    await world.file(b"/f", 100)
    return meta.Truncate(path=b"/f", length=5000)


@case(meta.Truncate)
async def truncation_of_nothing(world: World) -> meta.Request:
    return meta.Truncate(path=b"/f", length=5000)


@case(meta.SetAttr)
async def other_mode_and_owner(world: World) -> meta.Request:
    await world.file(b"/f")
    what = meta.SET_MODE | meta.SET_UID | meta.SET_MTIME
    return meta.SetAttr(path=b"/f", what=what, mode=0o600, uid=7, mtime_ns=5)


@case(meta.SetAttr)
async def mode_of_somebody_elses(world: World) -> meta.Request:
    await world.file(b"/f")
    world.me.creds = USER
    return meta.SetAttr(path=b"/f", what=meta.SET_MODE, mode=0o600)


@case(meta.SetAttr)
async def time_of_a_symlink(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.me(meta.SymLink(path=b"/l", target=b"f"))
    return meta.SetAttr(path=b"/l", follow=False, what=meta.SET_MTIME, mtime_ns=5)


@case(xattrs.SetXattr)
async def attribute(world: World) -> meta.Request:
    await world.file(b"/f")
    return xattrs.SetXattr(path=b"/f", name=b"user.a", value=b"1", flags=xattrs.XATTR_CREATE)


@case(xattrs.SetXattr)
async def attribute_that_is_there(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.me(xattrs.SetXattr(path=b"/f", name=b"user.a", value=b"1"))
    return xattrs.SetXattr(path=b"/f", name=b"user.a", value=b"2", flags=xattrs.XATTR_CREATE)


@case(xattrs.RemoveXattr)
async def removal_of_an_attribute(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.me(xattrs.SetXattr(path=b"/f", name=b"user.a", value=b"1"))
    return xattrs.RemoveXattr(path=b"/f", name=b"user.a")


@case(xattrs.RemoveXattr)
async def removal_of_a_missing_attribute(world: World) -> meta.Request:
    await world.file(b"/f")
    return xattrs.RemoveXattr(path=b"/f", name=b"user.a")
