"""Cases of names, KV spaces and locks (exactly_once.py)."""

from __future__ import annotations

from exactly_once_world import BATCH, USER, World, case

from ffs.proto import locking, meta
from ffs.proto.records import KvParams

# --- names ----------------------------------------------------------------------------------


@case(meta.MkDir)
async def directory(world: World) -> meta.Request:
    return meta.MkDir(path=b"/d")


@case(meta.MkDir)
async def directory_that_is_there(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d"))
    return meta.MkDir(path=b"/d")


@case(meta.MkDir)
async def directories_on_the_way(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/a"))
    return meta.MkDir(path=b"/a/b/c/d", parents=True)


@case(meta.MkDir)
async def directories_with_an_impossible_name(world: World) -> meta.Request:
    """What was made on the way is thrown away with the failure."""
    return meta.MkDir(path=b"/a/b/" + b"n" * 256, parents=True)


@case(meta.Rename)
async def rename(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d"))
    await world.file(b"/f", 5000)
    return meta.Rename(source=b"/f", target=b"/d/g")


@case(meta.Rename)
async def rename_over_a_file(world: World) -> meta.Request:
    await world.file(b"/f", 5000)
    await world.file(b"/g", 6000)
    return meta.Rename(source=b"/f", target=b"/g")


@case(meta.Rename)
async def exchange(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d/e", parents=True))
    await world.file(b"/f")
    return meta.Rename(source=b"/f", target=b"/d/e", flags=meta.RENAME_EXCHANGE)


@case(meta.Rename)
async def rename_onto_what_is_there(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.file(b"/g")
    return meta.Rename(source=b"/f", target=b"/g", flags=meta.RENAME_NOREPLACE)


@case(meta.Link)
async def further_name(world: World) -> meta.Request:
    await world.file(b"/f")
    return meta.Link(source=b"/f", target=b"/g")


@case(meta.Link)
async def publication(world: World) -> meta.Request:
    await world.file(b"/g", 5000)
    opened = await world.file(b"/", 7000, flags=meta.OPEN_TMPFILE, keep=True)
    return meta.Link(ino=opened.ino, handle=opened.handle, target=b"/g", replace=True)


@case(meta.Link)
async def name_that_is_taken(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.file(b"/g")
    return meta.Link(source=b"/f", target=b"/g")


@case(meta.SymLink)
async def symbolic_link(world: World) -> meta.Request:
    return meta.SymLink(path=b"/l", target=b"/nowhere")


@case(meta.SymLink)
async def symbolic_link_of_a_taken_name(world: World) -> meta.Request:
    await world.file(b"/l")
    return meta.SymLink(path=b"/l", target=b"/nowhere")


@case(meta.Unlink)
async def unlink(world: World) -> meta.Request:
    await world.file(b"/f", 5000)
    return meta.Unlink(path=b"/f")


@case(meta.Unlink)
async def unlink_of_one_name_of_two(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.me(meta.Link(source=b"/f", target=b"/g"))
    return meta.Unlink(path=b"/f")


@case(meta.Unlink)
async def unlink_of_nothing(world: World) -> meta.Request:
    return meta.Unlink(path=b"/f")


@case(meta.UnlinkMany)
async def many_unlinks(world: World) -> meta.Request:
    for i in range(BATCH):
        if i % 50:
            await world.file(b"/u%d" % i)
    return meta.UnlinkMany(paths=tuple(b"/u%d" % i for i in range(BATCH)))


@case(meta.RmDir)
async def rmdir(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d"))
    return meta.RmDir(path=b"/d")


@case(meta.RmDir)
async def rmdir_of_a_full_one(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d/e", parents=True))
    return meta.RmDir(path=b"/d")


@case(meta.RemoveTree)
async def removal_of_a_tree(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d/e", parents=True))
    await world.file(b"/d/e/f")
    return meta.RemoveTree(path=b"/d")


@case(meta.RemoveTree)
async def removal_of_a_tree_by_another(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d/e", mode=0o777, parents=True))
    await world.file(b"/d/e/f")
    world.me.creds = USER
    return meta.RemoveTree(path=b"/d")


@case(meta.RemoveTree)
async def removal_of_a_tree_that_may_not_be(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d/e", mode=0o700, parents=True, parent_mode=0o777))
    await world.file(b"/d/e/f")
    world.me.creds = USER
    return meta.RemoveTree(path=b"/d")


# --- KV spaces ------------------------------------------------------------------------------


@case(meta.KvCreate)
async def space(world: World) -> meta.Request:
    return meta.KvCreate(path=b"/kv", params=KvParams(4096, quota_bytes=1 << 20))


@case(meta.KvCreate)
async def space_of_a_taken_name(world: World) -> meta.Request:
    await world.file(b"/kv")
    return meta.KvCreate(path=b"/kv", params=KvParams(4096), exist_ok=True)


@case(meta.SetKvSpace)
async def bounds(world: World) -> meta.Request:
    await world.me(meta.KvCreate(path=b"/kv", params=KvParams(4096)))
    return meta.SetKvSpace(path=b"/kv", what=meta.SET_QUOTA, quota_bytes=1 << 20)


@case(meta.SetKvSpace)
async def bounds_of_a_file(world: World) -> meta.Request:
    await world.file(b"/kv")
    return meta.SetKvSpace(path=b"/kv", what=meta.SET_QUOTA, quota_bytes=1 << 20)


# --- locks ----------------------------------------------------------------------------------


@case(locking.Lock)
async def lock(world: World) -> meta.Request:
    await world.file(b"/f")
    return locking.Lock(path=b"/f", owner=1)


@case(locking.Lock)
async def lock_that_another_has(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.other(locking.Lock(path=b"/f", owner=1))
    return locking.Lock(path=b"/f", owner=1)


@case(locking.Lock)
async def lock_of_entries(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d"))
    return locking.Lock(path=b"/d", kind=locking.LOCK_ENTRIES, owner=1)


@case(locking.Lock)
async def lock_of_what_a_dead_client_had(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.other(locking.Lock(path=b"/f", owner=1))
    await world.first.handle(meta.SessionClose(client=world.other.client))
    return locking.Lock(path=b"/f", owner=1)


@case(locking.Unlock)
async def end_of_a_lock(world: World) -> meta.Request:
    await world.me(meta.MkDir(path=b"/d"))
    await world.me(locking.Lock(path=b"/d", kind=locking.LOCK_ENTRIES, owner=1))
    return locking.Unlock(path=b"/d", kind=locking.LOCK_ENTRIES, owner=1)


@case(locking.Unlock)
async def end_of_others_locks(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.other(locking.Lock(path=b"/f", owner=1, exclusive=False))
    return locking.Unlock(path=b"/f", force=True)


@case(locking.Unlock)
async def end_of_others_locks_by_somebody(world: World) -> meta.Request:
    await world.file(b"/f")
    await world.other(locking.Lock(path=b"/f", owner=1))
    world.me.creds = USER
    return locking.Unlock(path=b"/f", force=True)
