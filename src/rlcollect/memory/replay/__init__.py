"""Experience that is kept to be sampled from: written frame by frame, by one process or by many, and read meanwhile.

`cursors` says which frames stand, `places` where they lie, `table` moves them, `writing` and `sampling` are what its
names say; `buffer` is what users see of it. Nothing here knows who makes frames.
"""
