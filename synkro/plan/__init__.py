"""What a call will do, computed before anything is done: integers in, frozen dataclasses out.

Nothing in here knows a process, a device or a session.

    split    rows over ranks, rows over slices
    batch    what a user's ``batch=`` selects
    outputs  nested outputs as flat leaves, and the reduction of each
    call     the records that describe one call
"""
