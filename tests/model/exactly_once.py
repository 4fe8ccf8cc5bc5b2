"""For every request of the namespace: situations in which it is made. Used by test_exactly_once.py.

A case is an async function of a World that brings about the situation and returns the request. They stand in
exactly_once_files.py, _names.py and _quotas.py, by what the request is about. Read-only requests stand in
READ_ONLY, with the reason to leave one out in NOT_REPEATABLE. A request class that has neither fails the
test: add a case, one in which it succeeds and one in which it fails.
"""

from __future__ import annotations

import exactly_once_files  # noqa: F401 - each adds its cases
import exactly_once_names  # noqa: F401
import exactly_once_quotas  # noqa: F401

from ffs.proto import checks, locking, meta, quota, xattrs

READ_ONLY: set[type[meta.Request]] = {
    meta.Stat,
    meta.StatMany,
    meta.Access,
    meta.ReadDir,
    meta.ReadLink,
    meta.StatFs,
    meta.CapabilityRenew,
    meta.KvOpen,
    locking.GetLocks,
    xattrs.GetXattr,
    xattrs.ListXattr,
    checks.FsckScan,
    quota.GetQuota,
    quota.ListQuotas,
}
NOT_REPEATABLE: set[type[meta.Request]] = {
    meta.SessionOpen,  # a session whose answer was lost ends by itself
}
